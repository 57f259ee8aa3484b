"""From names of drafters to arms."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from foretell.config import SpeculationConfig
from foretell.errors import RequestError

from .measure import PLAIN, Variant
from .prompt import BenchPrompt

ADAPT = ("auto", "mix")  # these find out how far to guess
NEED_A_MODEL = ("model", "eagle", "block", "medusa", "mtp", "distilled")


def arms_of(names: Sequence[str], nodes: Sequence[int], base: SpeculationConfig) -> list[Variant]:
    """An arm for each drafter and number of tokens guessed; `a+b` is both behind one, which adapts."""
    arms: dict[str, Variant] = {}
    for name in names:
        if name in ("none", PLAIN.name):
            raise RequestError("drafters", f"{name} is what the others are compared with; leave it out")
        adapts = name in ADAPT or "+" in name
        for count in (None,) if adapts else nodes:
            label = name if adapts or len(nodes) == 1 else f"{name}, {count} tokens"
            arms[label] = Variant(label, replace(base, drafter=name.replace("+", ","), num_speculative_tokens=count))
    return list(arms.values())


def grid_of(names: Sequence[str], nodes: Sequence[int | None], base: SpeculationConfig) -> list[Variant]:
    """Every drafter with every number of tokens guessed; None lets it find out how many."""
    arms: list[Variant] = []
    for name, count in itertools.product(names, dict.fromkeys(nodes)):
        config = replace(base, drafter=name.replace("+", ","), num_speculative_tokens=count)
        if config.budget == 0 or name == PLAIN.name:
            raise RequestError("drafter", "is compared with plain decoding; name one that guesses")
        length = "" if len(nodes) == 1 else ", adaptive" if count is None else f", {count} tokens"
        arms.append(Variant(f"{name}{length}", config))
    if not arms:
        raise RequestError("drafter", "is empty; name one that guesses")
    return arms


def default_names(kinds: Iterable[str], layers: int, items: Sequence[BenchPrompt]) -> list[str]:
    """Every drafter that needs no other model and has something to go by; where a number is wanted, one that fits."""
    examples = {"exit": [f"exit:{max(1, layers // 2)}"], "self": ["self:int8", "self:int4"]}
    left_out = set(NEED_A_MODEL)
    if all(item.prediction is None for item in items):
        left_out.add("prediction")
    return [name for kind in kinds if kind not in left_out for name in examples.get(kind, [kind])] + ["auto"]
