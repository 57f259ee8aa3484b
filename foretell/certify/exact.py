"""Part one: every outcome of a rule over small vocabularies, with its exact probability."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from foretell.types import Draft, VerifyResult
from foretell.verify.lossy import DEFAULTS, ThresholdSettings
from foretell.verify.match import walk
from foretell.verify.randomness import RandomSource
from foretell.verify.rules import EXACT, find_rule

from .toy import KINDS, Make, World, bias, chain, law_of_step, mixed_chain, tree, unsure_stops, world

LARGEST_DISTANCE = 1e-12
LENGTH = 3  # tokens of the joint law; several steps follow each other
DRAFTS: dict[str, Make] = {
    "no draft": chain(0),
    "one drawn": chain(1),
    "two drawn": chain(2),
    "some drawn": mixed_chain((True, False)),
    "stops when unsure": unsure_stops(2),
    "drawn siblings": tree([[], []], replace=True),
}


@dataclass(frozen=True)
class ExactResult:
    """How far the worst case was from the target's law."""

    rule: str
    cases: int
    worst: float
    worst_case: str

    @property
    def passed(self) -> bool:
        return self.worst < LARGEST_DISTANCE


def check_exactly(rule: str, quick: bool = False) -> ExactResult:
    """Total variation between text written with drafts and the target's own, over worlds and ways to draft."""
    found: dict[str, float] = {}
    for kind in KINDS:
        here = world(kind, vocab=3, depth=LENGTH + 2, seed=3)
        for name, make in DRAFTS.items():
            if quick and name == "drawn siblings":
                continue
            found[f"{kind}, {name}"] = _bias(here, make, rule)
    worst = max(found, key=lambda name: found[name])
    return ExactResult(rule, len(found), found[worst], worst)


def drift(rule: str, settings: ThresholdSettings = DEFAULTS) -> float:
    """Of a lossy rule: mean total variation a step between the next token's law and the target's, in toy languages."""
    found = []
    judge = find_rule(rule, settings)
    for seed in range(20):
        here = world("random", vocab=4, depth=3, seed=seed)
        law: dict[int, float] = defaultdict(float)
        for written, probability in law_of_step(here, (), chain(2), judge).items():
            law[written[0]] += probability
        found.append(0.5 * sum(abs(law[token] - float(p)) for token, p in enumerate(here.target[()])))
    return sum(found) / len(found)


def _bias(here: World, make: Make, rule: str) -> float:
    if rule == "match":
        return bias(here, make, _match, LENGTH, guard=lambda chance: chance)  # it draws after every node, not once
    return bias(here, make, EXACT[rule], LENGTH)


def _match(draft: Draft, probs: Tensor, chance: RandomSource, /) -> VerifyResult:
    """The target's own token after the root and after every node, and the walk along them."""
    return walk(draft, tuple(chance.pick(row) for row in probs))
