"""Real noise over several steps gives the law; noise that a later step meets again does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretell.certify.toy import World, distance, plain_law, world
from foretell.sampling import noise
from foretell.verify import batched

from .crowd import BatchedRule, ByRoot, Crowd

TRIALS = 60_000
RULES: dict[str, BatchedRule] = {"rejection": batched.rejection, "block": batched.block}

# Cells of the law are few, so that 60,000 texts come within 0.006 of it nearly always.
CLOSE, CLEARLY = 0.008, 0.016


class ByPosition(ByRoot):
    """Coins and guesses by the place of the token they decide on."""

    def coins(self, seeds: Tensor, roots: Tensor, width: int) -> Tensor:
        return torch.cat([noise.accept_uniforms(seeds, roots + node, torch.tensor([0])) for node in range(width)], 1)

    def draft(self, seeds: Tensor, roots: Tensor, offset: int, vocab: int) -> Tensor:
        return noise.draft_noise(seeds, roots + offset, 0, torch.arange(vocab))


class OneCoin(ByRoot):
    """The same coin for every node of a draft."""

    def coins(self, seeds: Tensor, roots: Tensor, width: int) -> Tensor:
        return noise.accept_uniforms(seeds, roots, torch.arange(1)).expand(-1, width)


class EveryStepAlike(ByRoot):
    """Coins that do not know which step it is."""

    def coins(self, seeds: Tensor, roots: Tensor, width: int) -> Tensor:
        return noise.accept_uniforms(seeds, roots * 0, torch.arange(width))


class GuessAndCoinAlike(ByRoot):
    """Guesses drawn with the numbers that the residual is drawn with."""

    def draft(self, seeds: Tensor, roots: Tensor, offset: int, vocab: int) -> Tensor:
        return self.race(seeds, roots, vocab)


def bias(here: World, keys: ByRoot, rule: BatchedRule, width: int, length: int) -> float:
    return distance(Crowd(here, keys, TRIALS).law(rule, width, length), plain_law(here.target, here.vocab, length))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seed", range(3))
def test_several_steps_with_real_noise_keep_the_law(rule: BatchedRule, seed: int) -> None:
    assert bias(world("random", 2, 7, seed), ByRoot(), rule, 3, 3) < CLOSE


def test_a_larger_vocabulary_with_real_noise_keeps_the_law() -> None:
    for rule in RULES.values():
        assert bias(world("zeros", 4, 5, 3), ByRoot(), rule, 2, 2) < CLOSE


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (ByPosition(), batched.block),
        (OneCoin(), batched.block),
        (EveryStepAlike(), batched.rejection),
        (EveryStepAlike(), batched.block),
        (GuessAndCoinAlike(), batched.rejection),
    ],
)
def test_noise_met_twice_is_seen(keys: ByRoot, rule: BatchedRule) -> None:
    worst = max(bias(world("random", 2, 7, seed), keys, rule, 3, 3) for seed in range(3))
    assert worst > CLEARLY


def test_the_streams_of_a_step_have_nothing_in_common() -> None:
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
