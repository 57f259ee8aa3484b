"""The engine's noise keeps the target's distribution over several steps; noise that a later step reuses does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretell.certify.toy import ToyLanguage, target_distribution, total_variation, toy_language
from foretell.sampling import noise
from foretell.verify import batched

from .toy_batch import BatchedRule, ByRoot, ToyBatch

TRIALS = 60_000
RULES: dict[str, BatchedRule] = {"rejection": batched.rejection, "block": batched.block}

# The distribution has few cells, so that 60,000 outputs are within 0.006 of it nearly always.
MAX_DISTANCE = 0.008
MIN_BIAS = 0.016


class ByPosition(ByRoot):
    """Uniforms and draft noise keyed by the position of the token they decide."""

    def uniforms(self, seeds: Tensor, roots: Tensor, width: int) -> Tensor:
        return torch.cat([noise.accept_uniforms(seeds, roots + node, torch.tensor([0])) for node in range(width)], 1)

    def draft(self, seeds: Tensor, roots: Tensor, offset: int, vocab: int) -> Tensor:
        return noise.draft_noise(seeds, roots + offset, 0, torch.arange(vocab))


class OneUniform(ByRoot):
    """The same uniform for every node of a draft."""

    def uniforms(self, seeds: Tensor, roots: Tensor, width: int) -> Tensor:
        return noise.accept_uniforms(seeds, roots, torch.arange(1)).expand(-1, width)


class SameEveryStep(ByRoot):
    """The same uniforms in every step."""

    def uniforms(self, seeds: Tensor, roots: Tensor, width: int) -> Tensor:
        return noise.accept_uniforms(seeds, roots * 0, torch.arange(width))


class SharedDraftNoise(ByRoot):
    """Draft tokens sampled with the noise of the residual."""

    def draft(self, seeds: Tensor, roots: Tensor, offset: int, vocab: int) -> Tensor:
        return self.exponentials(seeds, roots, vocab)


def bias(language: ToyLanguage, keys: ByRoot, rule: BatchedRule, width: int, length: int) -> float:
    outputs = ToyBatch(language, keys, TRIALS).distribution(rule, width, length)
    return total_variation(outputs, target_distribution(language.target, language.vocab, length))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seed", range(3))
def test_several_steps_with_seeded_noise_keep_the_distribution(rule: BatchedRule, seed: int) -> None:
    assert bias(toy_language("random", 2, 7, seed), ByRoot(), rule, 3, 3) < MAX_DISTANCE


def test_a_larger_vocabulary_with_seeded_noise_keeps_the_distribution() -> None:
    for rule in RULES.values():
        assert bias(toy_language("zeros", 4, 5, 3), ByRoot(), rule, 2, 2) < MAX_DISTANCE


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (ByPosition(), batched.block),
        (OneUniform(), batched.block),
        (SameEveryStep(), batched.rejection),
        (SameEveryStep(), batched.block),
        (SharedDraftNoise(), batched.rejection),
    ],
)
def test_reused_noise_is_detected(keys: ByRoot, rule: BatchedRule) -> None:
    worst = max(bias(toy_language("random", 2, 7, seed), keys, rule, 3, 3) for seed in range(3))
    assert worst > MIN_BIAS


def test_the_noise_streams_of_a_step_are_uncorrelated() -> None:
    seeds, roots, lanes = torch.arange(3000), torch.full((3000,), 5), torch.arange(4)
    streams = [
        noise.exponential(seeds, roots, noise.TOKEN_STREAM, lanes),
        noise.residual_noise(seeds, roots, lanes),
        noise.accept_uniforms(seeds, roots, lanes).log().neg(),
        *(noise.draft_noise(seeds, roots, offset, lanes) for offset in range(3)),
        noise.draft_noise(seeds, roots + 1, 0, lanes),
    ]
    table = torch.corrcoef(torch.cat(streams, 1).T)
    assert (table - torch.eye(len(table))).abs().max() < 0.09
