"""One model on which drafters take turns: the memory of one engine, whatever the number of arms."""

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
from foretell.draft.base import Drafter, Wrapper
from foretell.draft.mix import MixDrafter
from foretell.draft.registry import make
from foretell.llm import LLM
from foretell.types import Budget, Draft, Sequence, StepResult

from .measure import Variant


class TimedDrafter(Wrapper):
    """Adds up the seconds that are spent in another drafter, and how far its guesses stood."""

    seconds = 0.0

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self._drafts: Counter[tuple[int, int]] = Counter()

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        with self._clock():
            return super().propose(seqs, budgets)

    def free_drafts(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        with self._clock():
            return super().free_drafts(seqs, nodes)

    def update_kv(self, outcomes: list[StepResult]) -> None:
        with self._clock():
            super().update_kv(outcomes)

    def observe(self, outcomes: list[StepResult]) -> None:
        for each in outcomes:
            if each.verify_result is not None and len(each.draft):
                self._drafts[max(each.draft.depths()), len(each.verify_result.accepted_path)] += 1
        with self._clock():
            super().observe(outcomes)

    def forget(self, seq: Sequence) -> None:
        with self._clock():
            super().forget(seq)

    def take_drafts(self) -> Counter[tuple[int, int]]:
        """Drafts since it was last asked, by how far they went and how far they stood."""
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
    """A drafter that is ready and knows its seconds; `place` puts one before the engine, with the seat's controller."""

    drafter: TimedDrafter
    place: Callable[[TimedDrafter], None]

    def take(self) -> None:
        """Let it guess for the requests that come now."""
        self.place(self.drafter)

    def pass_on(self, drafter: Drafter) -> DrafterSlot:
        """The same for another drafter of the same traits: what the controller has learnt stays."""
        return DrafterSlot(TimedDrafter(drafter), self.place)


class DrafterSlots:
    """Makes drafters for a model that is loaded, as often as wanted.

    Those with weights of their own are taken from the engine, which must have been opened with them; they keep
    nothing from one text to the next. The others may learn, and are made anew.
    """

    def __init__(self, llm: LLM, target: ModelSource) -> None:
        """`target` is what the engine's model was opened from."""
        self.llm, self._target = llm, target
        self._loaded = dict(llm.engine.drafter.drafters)
        self._parts = draft.DrafterParts(llm.speculation, llm.engine.runner, llm.tokenizer)

    def make(self, config: SpeculationConfig, drafter: Drafter | None = None) -> DrafterSlot:
        """A drafter with the controller its config asks for, which knows what steps and drafts cost as far as the
        engine does.

        Nothing else is learnt yet. `drafter` overrides the config's.
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

        def place(drafter: TimedDrafter) -> None:
            assert not engine.busy, "a text that is being written belongs to its drafter"
            engine.drafter = requests.drafter = drafter
            engine.controller, requests.defaults = controller, defaults

        return DrafterSlot(timed, place)

    def drafter(self, config: SpeculationConfig) -> Drafter:
        """One that has learnt nothing yet."""
        config = with_shipped_heads(config, self.llm.config.model)
        named, parts = draft.arms(config), replace(self._parts, config=config)
        if not any(has_weights(name) for name in named):
            return draft.build(parts)
        names = dict.fromkeys((*named, draft.WITH_REQUEST))
        return MixDrafter(
            [self._loaded[name] if has_weights(name) else make(parts, name) for name in names], draft.defaults(config)
        )


def has_weights(name: str) -> bool:
    """Whether a drafter brings a model, a head, or a copy of the target in fewer bits."""
    config = SpeculationConfig(drafter=name)
    return bool(draft.models_wanted(config) or draft.copies_wanted(config) or draft.heads_wanted(config))


def open_with(arms: Several[Variant], **options: Any) -> LLM:
    """A model with all that these arms will need; what they share of speculation is theirs from the start."""
    model = str(options.get("model", EngineConfig.model))
    names = dict.fromkeys(name for arm in arms for name in draft.arms(with_shipped_heads(arm.speculation, model)))
    shared = asdict(replace(arms[0].speculation, drafter=",".join(names), num_speculative_tokens=None))
    return LLM(**shared, **options)
