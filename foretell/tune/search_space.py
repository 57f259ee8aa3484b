"""Search space of the tuner: drafters, draft lengths and lossless verification rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.bench.measure import ADAPTIVE, NEED_A_MODEL, PLAIN, Variant
from foretell.bench.prompt import BenchPrompt
from foretell.config import SpeculationConfig
from foretell.errors import RequestError

# Drafters that sample their drafts at temperature > 0, so that the rule can matter.
SAMPLING_DRAFTERS = (*NEED_A_MODEL, "self", "exit")
LENGTHS = (2, 4, 8)
BLOCK, AUTO, DEFAULT_RULE = "block", "auto", SpeculationConfig.rule


@dataclass(frozen=True)
class SearchSpace:
    """Drafters and draft lengths whose combinations are tried."""

    drafters: Sequence[str]
    lengths: Sequence[int]
    sampled: bool  # temperature > 0, where `block` may accept more than `match`

    def variants(self, base: SpeculationConfig) -> list[Variant]:
        """Return each drafter with adaptive and fixed lengths, and with a second rule where it can matter."""
        found: dict[str, Variant] = {}
        for name in self.drafters:
            if name in ("none", PLAIN.name):
                raise RequestError("drafters", f"{name} is what the others are compared with; leave it out")
            for length in self._lengths(name):
                for rule in self._rules(name, base.rule):
                    variant = _variant(name, length, rule, base)
                    found[variant.name] = variant
        return list(found.values())

    def _lengths(self, name: str) -> list[int | None]:
        adapts = name in ADAPTIVE or "+" in name
        return [None] if adapts else [None, *self.lengths]

    def _rules(self, name: str, default: str) -> list[str]:
        samples = any(part.partition(":")[0] in SAMPLING_DRAFTERS for part in name.split("+"))
        return [default, BLOCK] if self.sampled and samples and default == "match" else [default]


def _variant(name: str, length: int | None, rule: str, base: SpeculationConfig) -> Variant:
    labels = [name, "adapting" if length is None else f"{length} tokens"]
    if rule != base.rule:
        labels.append(rule)
    config = replace(base, drafter=name.replace("+", ","), num_speculative_tokens=length, rule=rule)
    return Variant(", ".join(labels), config)


def is_sampled(items: Sequence[BenchPrompt], temperature: float | None) -> bool:
    """Return whether any request of a workload has a temperature above 0."""
    if temperature is not None:
        return temperature > 0
    return any(item.sampling.get("temperature", 0) for item in items)


def interleave_tasks(items: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Return the prompts with their tasks interleaved, so that any prefix of the list covers all tasks."""
    by_task: dict[str, list[BenchPrompt]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    longest = max(map(len, by_task.values()), default=0)
    return [group[i] for i in range(longest) for group in by_task.values() if i < len(group)]


def serve_settings(variant: Variant, engine: dict[str, Any], rule: str = DEFAULT_RULE) -> dict[str, Any]:
    """Return the settings for `foretell serve --config`: the engine's and those of the variant.

    `rule` is the one that was requested. If `block` is faster, the config says `auto`, so that requests with a seed,
    whose output would change, keep theirs.
    """
    config, default = variant.speculation, SpeculationConfig()
    if config.rule == BLOCK != rule:
        config = replace(config, rule=AUTO)
    own = {
        name: getattr(config, name)
        for name in SpeculationConfig.__dataclass_fields__
        if name == "drafter" or getattr(config, name) != getattr(default, name)
    }
    return {**engine, **own}
