"""Part one: every outcome of a rule over small vocabularies, with its exact probability."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from foretell.types import Verdict
from foretell.verify.chance import Chance, enumerate_chance
from foretell.verify.match import walk
from foretell.verify.rules import EXACT, find_rule
from foretell.verify.threshold import DEFAULTS, ThresholdSettings

from .toy import KINDS, Context, Law, Make, World, bias, distance, law_of_step, plain_law, target_rows, world
from .toy_drafters import chain, mixed_chain, tree, unsure_stops

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
            found[f"{kind}, {name}"] = _match_bias(here, make) if rule == "match" else _rule_bias(here, make, rule)
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


def _rule_bias(here: World, make: Make, rule: str) -> float:
    return bias(here, make, EXACT[rule], LENGTH)


def _match_bias(here: World, make: Make) -> float:
    """`match` draws the target's token after every node and walks; what it writes must be the target's law."""
    done: Law = defaultdict(float)
    begun: Law = defaultdict(float, {(): 1.0})
    while begun:
        context = min(begun, key=len)
        probability = begun.pop(context)
        for share, written in enumerate_chance(lambda chance, c=context: _match_step(here, c, make, chance)):  # type: ignore[misc]
            text = context + written
            (begun if len(text) < LENGTH else done)[text[:LENGTH]] += probability * share
    return distance(done, plain_law(here.target, here.vocab, LENGTH))


def _match_step(here: World, context: Context, make: Make, chance: Chance) -> Context:
    """Tokens are drawn only where the walk looks: the law is the same and there are fewer outcomes."""
    draft = make(here, context, chance)
    rows = target_rows(here, context, draft)
    chosen: dict[int, int] = {}

    class Lazy(tuple[int, ...]):
        def __getitem__(self, row: object) -> int:  # type: ignore[override]
            assert isinstance(row, int)
            if row not in chosen:
                chosen[row] = chance.pick(rows[row])
            return chosen[row]

    verdict: Verdict = walk(draft, Lazy())
    return (*(draft.tokens[node] for node in verdict.path), verdict.next_token)
