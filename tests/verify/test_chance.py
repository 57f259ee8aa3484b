"""Chance, real and enumerated."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from torch import Tensor

from foretell.certify.toy import Context, Law, chain, distance, plain_law, target_rows, world
from foretell.sampling import noise
from foretell.verify.randomness import RandomSource, StepRandom, enumerate_chance
from foretell.verify.rules import EXACT, Rule

SEEDS = 2500


def test_enumeration_meets_every_outcome_once_with_its_probability() -> None:
    def run(chance: RandomSource) -> tuple[bool, int]:
        return (True, chance.pick(torch.tensor([1.0, 0.0, 3.0]))) if chance.flip(0.25, 0) else (False, -1)

    outcomes = {value: probability for probability, value in enumerate_chance(run)}
    assert outcomes == {(False, -1): 0.75, (True, 0): 0.0625, (True, 2): 0.1875}


def test_enumeration_skips_what_cannot_happen() -> None:
    runs = enumerate_chance(lambda chance: (chance.flip(0.0, 0), chance.flip(1.0, 1)))
    assert runs == [(1.0, (False, True))]
    assert enumerate_chance(lambda chance: "no choice") == [(1.0, "no choice")]


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.93, 1.0])
def test_a_coin_falls_as_often_as_asked(probability: float) -> None:
    seen = sum(StepRandom(seed, 3).flip(probability, 2) for seed in range(SEEDS)) / SEEDS
    assert abs(seen - probability) < 4.5 * (probability * (1 - probability) / SEEDS) ** 0.5 + 1e-12


def test_coins_of_nodes_roots_and_seeds_are_independent() -> None:
    pairs = Counter()
    for seed in range(SEEDS):
        here, there = StepRandom(seed, 8), StepRandom(seed, 9)
        pairs[here.flip(0.5, 0), here.flip(0.5, 1), there.flip(0.5, 0)] += 1
    assert len(pairs) == 8
    assert max(abs(count / SEEDS - 1 / 8) for count in pairs.values()) < 0.03


def test_a_token_is_picked_in_proportion_to_its_weight() -> None:
    weights = torch.tensor([0.0, 2.0, 1.0, 0.0, 5.0])
    seen = (
        torch.bincount(torch.tensor([StepRandom(seed, 1).pick(weights) for seed in range(SEEDS)]), minlength=5) / SEEDS
    )
    assert (seen - weights / 8).abs().max() < 0.045
    assert seen[[0, 3]].sum() == 0


def test_the_same_seed_and_root_decide_alike_and_others_do_not() -> None:
    weights = torch.ones(1000)
    assert StepRandom(5, 6).pick(weights) == StepRandom(5, 6).pick(weights)
    assert len({StepRandom(seed, root).pick(weights) for seed in range(10) for root in range(10)}) > 80


class DraftDraws:
    """Draws the nodes of a draft as a drafter does: node after node, each by noise of its own."""

    def __init__(self, seed: int, root: int) -> None:
        self.key = torch.tensor([seed]), torch.tensor([root])
        self.offset = 0

    def flip(self, probability: float, node: int) -> bool:
        raise NotImplementedError("a drafter has no coins")

    def pick(self, weights: Tensor) -> int:
        race = noise.draft_noise(*self.key, self.offset, torch.arange(len(weights)))[0]
        self.offset += 1
        return int((weights / race).argmax())


@pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)
def test_steps_with_real_noise_that_follow_each_other_keep_the_law(rule: Rule) -> None:
    here, texts = world("random", 2, 5, seed=3), 1200
    law: Law = defaultdict(float)
    for seed in range(texts):
        text: Context = ()
        while len(text) < 2:
            draft = chain(2)(here, text, DraftDraws(seed, len(text)))
            verdict = rule(draft, target_rows(here, text, draft), StepRandom(seed, len(text)))
            text += (*(draft.tokens[node] for node in verdict.accepted_path), verdict.next_token)
        law[text[:2]] += 1 / texts
    assert distance(law, plain_law(here.target, 2, 2)) < 0.05
