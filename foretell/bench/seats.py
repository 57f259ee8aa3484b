"""One model on which drafters take turns: the memory of one engine, whatever the number of arms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from foretell import draft
from foretell.build import Opened, build_controller, default_choice
from foretell.config import SpeculationConfig
from foretell.draft.base import Drafter, Wrapper
from foretell.draft.mix import MixDrafter
from foretell.draft.registry import make
from foretell.llm import LLM
from foretell.types import Budget, Draft, Outcome, Sequence

from .measure import Arm


class TimedDrafter(Wrapper):
    """Adds up the seconds that are spent in another drafter."""

    seconds = 0.0

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        with self._clock():
            return super().propose(seqs, budgets)

    def offers(self, seqs: list[Sequence], nodes: int) -> list[Mapping[str, Draft]]:
        with self._clock():
            return super().offers(seqs, nodes)

    def observe(self, outcomes: list[Outcome]) -> None:
        with self._clock():
            super().observe(outcomes)

    def forget(self, seq: Sequence) -> None:
        with self._clock():
            super().forget(seq)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - began


@dataclass(frozen=True)
class Seat:
    """A drafter that is ready; `take` lets it guess for the requests that come now, `drafter` knows its seconds."""

    drafter: TimedDrafter
    take: Callable[[], None]


class Seats:
    """Makes drafters for a model that is loaded, as often as wanted.

    Those with weights of their own are taken from the engine, which must have been opened with them; they keep
    nothing from one text to the next. The others may learn, and are made anew.
    """

    def __init__(self, llm: LLM, target: Opened) -> None:
        """`target` is what the engine's model was opened from."""
        self.llm, self._target = llm, target
        self._loaded = dict(llm.engine.drafter.arms)
        self._parts = draft.Parts(llm.speculation, llm.engine.runner, llm.tokenizer)

    def make(self, config: SpeculationConfig) -> Seat:
        """A drafter that has learnt nothing yet, with the controller its config asks for."""
        engine, requests = self.llm.engine, self.llm.assembly.requests
        drafter = TimedDrafter(self._drafter(config))
        controller, defaults = build_controller(config, drafter, self._target), default_choice(config)

        def take() -> None:
            assert not engine.busy, "a text that is being written belongs to its drafter"
            engine.drafter = requests.drafter = drafter
            engine.controller, requests.defaults = controller, defaults

        return Seat(drafter, take)

    def _drafter(self, config: SpeculationConfig) -> Drafter:
        named, parts = draft.arms(config), replace(self._parts, config=config)
        if not any(has_weights(name) for name in named):
            return draft.build(parts)
        names = dict.fromkeys((*named, draft.WITH_REQUEST))
        return MixDrafter([self._loaded[name] if has_weights(name) else make(parts, name) for name in names], named)


def has_weights(name: str) -> bool:
    """Whether a drafter brings a model, or a copy of the target in fewer bits."""
    config = SpeculationConfig(drafter=name)
    return bool(draft.models_wanted(config) or draft.copies_wanted(config))


def open_with(arms: Several[Arm], **options: Any) -> LLM:
    """A model with all that these arms will need; what they share of speculation is theirs from the start."""
    names = dict.fromkeys(name for arm in arms for name in draft.arms(arm.speculation))
    shared = asdict(replace(arms[0].speculation, drafter=",".join(names), num_speculative_tokens=None))
    return LLM(**shared, **options)
