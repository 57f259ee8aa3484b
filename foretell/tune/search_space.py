"""What is tried: drafters, how far they guess, and by which lossless rule guesses stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.bench.measure import ADAPT, NEED_A_MODEL, PLAIN, Variant
from foretell.bench.prompt import BenchPrompt
from foretell.config import SpeculationConfig
from foretell.errors import RequestError

DRAWING = (*NEED_A_MODEL, "self", "exit")  # whose guesses may be drawn where a request samples: a rule can matter
LENGTHS = (2, 4, 8)
BLOCK, AUTO, DEFAULT_RULE = "block", "auto", SpeculationConfig.rule


@dataclass(frozen=True)
class SearchSpace:
    """The names and numbers that arms are made of."""

    drafters: Sequence[str]
    lengths: Sequence[int]
    sampled: bool  # whether tokens are drawn, so that `block` may accept more than `match`

    def variants(self, base: SpeculationConfig) -> list[Variant]:
        """Each drafter adapting and at each length, and by another rule where that can matter."""
        found: dict[str, Variant] = {}
        for name in self.drafters:
            if name in ("none", PLAIN.name):
                raise RequestError("drafters", f"{name} is what the others are compared with; leave it out")
            for length in self._lengths(name):
                for rule in self._rules(name, base.rule):
                    arm = _arm(name, length, rule, base)
                    found[arm.name] = arm
        return list(found.values())

    def _lengths(self, name: str) -> list[int | None]:
        adapts = name in ADAPT or "+" in name
        return [None] if adapts else [None, *self.lengths]

    def _rules(self, name: str, usual: str) -> list[str]:
        draws = any(part.partition(":")[0] in DRAWING for part in name.split("+"))
        return [usual, BLOCK] if self.sampled and draws and usual == "match" else [usual]


def _arm(name: str, length: int | None, rule: str, base: SpeculationConfig) -> Variant:
    words = [name, "adapting" if length is None else f"{length} tokens"]
    if rule != base.rule:
        words.append(rule)
    config = replace(base, drafter=name.replace("+", ","), num_speculative_tokens=length, rule=rule)
    return Variant(", ".join(words), config)


def is_sampled(items: Sequence[BenchPrompt], temperature: float | None) -> bool:
    """Whether any text of a workload is drawn."""
    if temperature is not None:
        return temperature > 0
    return any(item.sampling.get("temperature", 0) for item in items)


def interleave_tasks(items: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Tasks in turn, so that any beginning of the list is of all kinds."""
    by_task: dict[str, list[BenchPrompt]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    longest = max(map(len, by_task.values()), default=0)
    return [group[i] for i in range(longest) for group in by_task.values() if i < len(group)]


def serve_settings(arm: Variant, engine: dict[str, Any], rule: str = DEFAULT_RULE) -> dict[str, Any]:
    """What `foretell serve --config` reads: what was given for the engine, and the arm's own.

    `rule` is the one that was asked for. Where `block` is faster than that, `auto` is served: requests with a seed,
    which alone can tell, keep their text.
    """
    config, usual = arm.speculation, SpeculationConfig()
    if config.rule == BLOCK != rule:
        config = replace(config, rule=AUTO)
    own = {
        name: getattr(config, name)
        for name in SpeculationConfig.__dataclass_fields__
        if name == "drafter" or getattr(config, name) != getattr(usual, name)
    }
    return {**engine, **own}
