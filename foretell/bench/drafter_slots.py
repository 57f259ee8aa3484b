"""Drafters that take turns on one engine, so that any number of variants needs the memory of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from foretell import draft
from foretell.build.controller_factory import build_controller, default_choice
from foretell.build.draft_heads import with_shipped_heads
from foretell.build.model_source import ModelSource
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.registry import make
from foretell.llm import LLM
from foretell.types import Budget, Draft, Sequence, StepResult

from .measure import Variant


class TimedDrafter(MixDrafter):
    """A wrapper that adds up the seconds spent in a drafter and counts its drafts by accepted tokens."""

    seconds = 0.0

    def __init__(self, drafter: Drafter) -> None:
        mix = MixDrafter.of(drafter)
        super().__init__(mix.drafters.values(), mix.default_drafters, mix.supervisor)
        self._drafts: Counter[tuple[int, int]] = Counter()

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        with self._clock():
            return super().propose(seqs, budgets)

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        with self._clock():
            return super().free_drafts(seqs, nodes)

    def update_kv(self, results: list[StepResult]) -> None:
        with self._clock():
            super().update_kv(results)

    def observe(self, results: list[StepResult]) -> None:
        for each in results:
            if each.verify_result is not None and len(each.draft):
                self._drafts[max(each.draft.depths()), len(each.verify_result.accepted_path)] += 1
        with self._clock():
            super().observe(results)

    def forget(self, seq: Sequence) -> None:
        with self._clock():
            super().forget(seq)

    def take_drafts(self) -> Counter[tuple[int, int]]:
        """Return and reset the counts of drafts by (depth, accepted tokens)."""
        drafts, self._drafts = self._drafts, Counter()
        return drafts

    @contextmanager
    def _clock(self) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - began


@dataclass(frozen=True)
class DrafterSlot:
    """A timed drafter with a controller; `activate_drafter` installs a drafter with this controller in the engine."""

    drafter: TimedDrafter
    activate_drafter: Callable[[TimedDrafter], None]

    def activate(self) -> None:
        """Use this drafter for the next requests."""
        self.activate_drafter(self.drafter)

    def with_drafter(self, drafter: Drafter) -> DrafterSlot:
        """Return a slot for another drafter of the same traits that keeps the controller and its learned state."""
        return DrafterSlot(TimedDrafter(drafter), self.activate_drafter)


class DrafterSlots:
    """A factory of drafters for a loaded model.

    Drafters with weights are taken from the engine, which must have been loaded with them; they keep no state between
    sequences. The others may learn and are built again each time.
    """

    def __init__(self, llm: LLM, target: ModelSource) -> None:
        """`target` is the source that the engine's model was loaded from."""
        self.llm, self._target = llm, target
        self._loaded = dict(llm.engine.drafter.drafters)
        self._parts = draft.DrafterParts(llm.speculation, llm.engine.runner, llm.tokenizer)

    def make(self, config: SpeculationConfig, drafter: Drafter | None = None) -> DrafterSlot:
        """Build a drafter and the controller of its config; `drafter` overrides the config's.

        The controller gets the step and draft costs that the engine has measured, and no other learned state.
        """
        engine, requests = self.llm.engine, self.llm.assembly.requests
        timed = TimedDrafter(drafter or self.drafter(config))
        controller, defaults = build_controller(config, timed, self._target), default_choice(config)
        measured = self.llm.assembly.profiler.controller
        if measured.costs.is_known:
            controller.costs.load(measured.costs.dump())
        for name, costs in controller.draft_costs.items():
            if name in measured.draft_costs:
                costs.load(measured.draft_costs[name].dump())

        def activate(drafter: TimedDrafter) -> None:
            assert not engine.busy, "running sequences belong to the drafter they started with"
            engine.drafter = requests.drafter = drafter
            engine.controller, requests.defaults = controller, defaults

        return DrafterSlot(timed, activate)

    def drafter(self, config: SpeculationConfig) -> Drafter:
        """Return a drafter with no learned state."""
        config = with_shipped_heads(config, self.llm.config.model)
        named, parts = draft.drafter_names(config), replace(self._parts, config=config)
        if not any(has_weights(name) for name in named):
            return draft.build(parts)
        names = dict.fromkeys((*named, draft.PREDICTION))
        return MixDrafter(
            [self._loaded[name] if has_weights(name) else make(parts, name) for name in names],
            draft.default_drafters(config),
        )


def has_weights(name: str) -> bool:
    """Return whether a drafter has a model, a head, or a quantized copy of the target."""
    config = SpeculationConfig(drafter=name)
    return bool(draft.models_wanted(config) or draft.copies_wanted(config) or draft.heads_wanted(config))


def load_llm_for(variants: Several[Variant], **options: Any) -> LLM:
    """Load a model with the drafters of all variants and their common speculation settings."""
    model = str(options.get("model", EngineConfig.model))
    configs = [with_shipped_heads(variant.speculation, model) for variant in variants]
    names = dict.fromkeys(name for config in configs for name in draft.drafter_names(config))
    shared = asdict(replace(variants[0].speculation, drafter=",".join(names), num_speculative_tokens=None))
    return LLM(**shared, **options)
