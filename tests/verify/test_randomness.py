"""Random sources: seeded noise and the enumeration of all outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from torch import Tensor

from foretell.certify.toy import (
    Context,
    Distribution,
    chain,
    target_distribution,
    target_rows,
    total_variation,
    toy_language,
)
from foretell.sampling import noise
from foretell.verify.randomness import RandomSource, StepRandom, enumerate_outcomes
from foretell.verify.rules import EXACT, Rule

SEEDS = 2500


def test_enumeration_visits_every_outcome_once_with_its_probability() -> None:
    def run(random: RandomSource) -> tuple[bool, int]:
        return (True, random.sample(torch.tensor([1.0, 0.0, 3.0]))) if random.accepts(0.25, 0) else (False, -1)

    outcomes = {value: probability for probability, value in enumerate_outcomes(run)}
    assert outcomes == {(False, -1): 0.75, (True, 0): 0.0625, (True, 2): 0.1875}


def test_enumeration_skips_impossible_outcomes() -> None:
    runs = enumerate_outcomes(lambda random: (random.accepts(0.0, 0), random.accepts(1.0, 1)))
    assert runs == [(1.0, (False, True))]
    assert enumerate_outcomes(lambda random: "no choice") == [(1.0, "no choice")]


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.93, 1.0])
def test_a_node_is_accepted_with_the_given_probability(probability: float) -> None:
    seen = sum(StepRandom(seed, 3).accepts(probability, 2) for seed in range(SEEDS)) / SEEDS
    assert abs(seen - probability) < 4.5 * (probability * (1 - probability) / SEEDS) ** 0.5 + 1e-12


def test_uniforms_of_nodes_and_roots_are_independent() -> None:
    pairs = Counter()
    for seed in range(SEEDS):
        step, other_step = StepRandom(seed, 8), StepRandom(seed, 9)
        pairs[step.accepts(0.5, 0), step.accepts(0.5, 1), other_step.accepts(0.5, 0)] += 1
    assert len(pairs) == 8
    assert max(abs(count / SEEDS - 1 / 8) for count in pairs.values()) < 0.03


def test_a_token_is_sampled_in_proportion_to_its_weight() -> None:
    weights = torch.tensor([0.0, 2.0, 1.0, 0.0, 5.0])
    seen = (
        torch.bincount(torch.tensor([StepRandom(seed, 1).sample(weights) for seed in range(SEEDS)]), minlength=5)
        / SEEDS
    )
    assert (seen - weights / 8).abs().max() < 0.045
    assert seen[[0, 3]].sum() == 0


def test_noise_depends_on_seed_and_root() -> None:
    weights = torch.ones(1000)
    assert StepRandom(5, 6).sample(weights) == StepRandom(5, 6).sample(weights)
    assert len({StepRandom(seed, root).sample(weights) for seed in range(10) for root in range(10)}) > 80


class DraftRandom:
    """Noise of a drafter: each node is sampled with noise of its own, node after node."""

    def __init__(self, seed: int, root: int) -> None:
        self.key = torch.tensor([seed]), torch.tensor([root])
        self.offset = 0

    def accepts(self, probability: float, node: int) -> bool:
        raise NotImplementedError("a drafter accepts nothing")

    def sample(self, weights: Tensor) -> int:
        exponentials = noise.draft_noise(*self.key, self.offset, torch.arange(len(weights)))[0]
        self.offset += 1
        return int((weights / exponentials).argmax())


@pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
def test_consecutive_steps_with_seeded_noise_keep_the_distribution(rule: Rule) -> None:
    language = toy_language("random", 2, 5, seed=3)
    samples = 1200
    frequencies: Distribution = defaultdict(float)
    for seed in range(samples):
        output: Context = ()
        while len(output) < 2:
            draft = chain(2)(language, output, DraftRandom(seed, len(output)))
            result = rule(draft, target_rows(language, output, draft), StepRandom(seed, len(output)))
            output += (*(draft.tokens[node] for node in result.accepted_path), result.next_token)
        frequencies[output[:2]] += 1 / samples
    assert total_variation(frequencies, target_distribution(language.target, 2, 2)) < 0.05
