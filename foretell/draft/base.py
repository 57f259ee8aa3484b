"""The interface of a drafter, and a wrapper that forwards to another drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod

from foretell.errors import RequestError
from foretell.types import Budget, Draft, DrafterTraits, Sequence, StepResult

# Attributes that drafters of earlier versions set themselves, and the field of `DrafterTraits` that took over.
OLD_ATTRIBUTES = {
    "taps": "hidden_layers",
    "wants_top": "top_k",
    "draws": "samples",
    "gives_probability": "gives_probability",
    "grows": "makes_trees",
    "whole": "single_graph",
    "draws_whole": "samples_single_graph",
    "unseen_on": "draft_device",
    "free": "is_free",
    "reads": "needs_prefill",
    "cost_share": "relative_cost",
    "prior": "prior_acceptance",
    "stands_back": "defers_to_confident",
}


class Drafter(ABC):
    """Proposes draft tokens for sequences. A wrong draft token costs time, never correctness."""

    name: str = ""
    traits: DrafterTraits = DrafterTraits()

    @abstractmethod
    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        """Return one draft per sequence, each within its budget; an empty draft is always allowed."""

    def prepare(self, seqs: list[Sequence]) -> None:  # noqa: B027 - most drafters have nothing to prepare
        """Do work that the first drafts of these sequences would otherwise wait for.

        The engine calls this while the device prefills the prompts, where it has the time; it may never call it.
        """

    def observe(self, results: list[StepResult]) -> None:  # noqa: B027 - most drafters learn nothing
        """Learn from the results of a step, including drafts of other drafters."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027 - most drafters keep nothing per sequence
        """Drop all state of a sequence that has finished."""


class HiddenStateDrafter(Drafter):
    """A drafter that reads hidden states of the target and keeps KV of its own in the target's pages."""

    @abstractmethod
    def update_kv(self, results: list[StepResult]) -> None:
        """Take over the hidden states of a step for every sequence, before full pages enter the prefix cache."""


class Wrapper(HiddenStateDrafter):
    """Forwards every call to another drafter; subclasses change some of them."""

    def __init__(self, inner: Drafter) -> None:
        self.name, self.traits = inner.name, inner.traits
        self.wrap(inner)

    def wrap(self, inner: Drafter) -> None:
        """Forward to `inner` from now on, under the same name and traits."""
        self.inner = inner
        self._inner_with_kv = inner if isinstance(inner, HiddenStateDrafter) else None

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return self.inner.propose(seqs, budgets)

    def prepare(self, seqs: list[Sequence]) -> None:
        self.inner.prepare(seqs)

    def update_kv(self, results: list[StepResult]) -> None:
        if self._inner_with_kv is not None:
            self._inner_with_kv.update_kv(results)

    def observe(self, results: list[StepResult]) -> None:
        self.inner.observe(results)

    def forget(self, seq: Sequence) -> None:
        self.inner.forget(seq)


def check_traits(drafter: Drafter) -> None:
    """Raise if a drafter sets an attribute of earlier versions, which would be ignored."""
    own = getattr(drafter, "__dict__", {})
    for old, new in OLD_ATTRIBUTES.items():
        if old in own or hasattr(type(drafter), old):
            kind = type(drafter).__name__
            raise RequestError("drafter", f"{kind} sets `{old}`; set `traits = DrafterTraits({new}=...)` instead")
