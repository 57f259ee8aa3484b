"""Protects the engine from faulty drafters: back-off after failures, copies of sequences, validation of drafts."""

from __future__ import annotations

import logging
import operator
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretell.draft.base import Drafter, Wrapper, check_traits
from foretell.types import NO_DRAFT, Budget, Draft, Sequence, StepResult

LOG = logging.getLogger("foretell")

TOLERATED = 2  # failures in a row of one method before the first pause
FIRST_PAUSE = 1.0  # seconds; each further failure in a row doubles it
LONGEST_PAUSE = 300.0  # seconds
LOG_INTERVAL = 60.0  # seconds between two tracebacks of one drafter
BOOKKEEPING = ("update_kv", "observe", "forget")  # keep a drafter up to date while its drafts pause

Result = TypeVar("Result")


class Backoff:
    """Failures in a row, and the time of the next attempt."""

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        tolerated: int = TOLERATED,
        first: float = FIRST_PAUSE,
        longest: float = LONGEST_PAUSE,
    ) -> None:
        self._clock, self._tolerated, self._first, self._longest = clock, tolerated, first, longest
        self._retry_at = 0.0
        self.failures = 0  # in a row

    def fail(self) -> float:
        """Count a failure and return the seconds until the next attempt."""
        self.failures += 1
        doublings = self.failures - self._tolerated - 1
        if doublings < 0:
            return 0.0
        pause = min(self._longest, self._first * 2.0 ** min(doublings, 64))
        self._retry_at = self._clock() + pause
        return pause

    def succeed(self) -> None:
        self.failures = 0

    @property
    def waiting(self) -> bool:
        return self.failures > self._tolerated and self._clock() < self._retry_at


class Supervisor:
    """Calls the methods of drafters. A failure costs the result of one call; failures in a row pause the drafter.

    Each method has a back-off of its own, which a success of this method resets. While one of them waits, the drafter
    is disabled: the engine asks it for no drafts. Its bookkeeping goes on, except for a method that waits itself.
    `update_kv` and `forget` never wait, because a drafter that misses one of them is no longer up to date.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._failing: dict[tuple[str, str], Backoff] = {}  # by drafter and method: failures without a success since
        self._logged: dict[str, float] = {}  # by drafter: time of the last traceback
        self.failures: Counter[str] = Counter()  # by drafter, since the start

    @property
    def disabled(self) -> frozenset[str]:
        """The drafters that pause now."""
        if not self._failing:
            return frozenset()
        failing = list(self._failing.items())  # metrics ask in another thread
        return frozenset(name for (name, _), backoff in failing if backoff.waiting)

    def call(self, name: str, method: str, do: Callable[[], Result], otherwise: Result, always: bool = False) -> Result:
        """Return the result of `do`, or `otherwise` where it fails or the drafter pauses; `always`: never pause."""
        if self._failing and not always and self._pauses(name, method):
            return otherwise
        try:
            result = do()
        except BaseException as error:
            if comes_from_signal(error):
                raise
            self.fail(name, method, error)
            return otherwise
        if self._failing:
            self.succeed(name, method)
        return result

    def _pauses(self, name: str, method: str) -> bool:
        if method not in BOOKKEEPING:
            return name in self.disabled
        backoff = self._failing.get((name, method))
        return backoff is not None and backoff.waiting

    def fail(self, name: str, method: str, error: BaseException) -> None:
        """Count a failure; a traceback is logged once in LOG_INTERVAL, a pause always."""
        self.failures[name] += 1
        backoff = self._failing.setdefault((name, method), Backoff(self._clock))
        pause = 0.0 if backoff.waiting else backoff.fail()  # a pause is not prolonged, whatever fails during it
        words = f"{type(error).__name__}: {error}"
        if pause:
            count = backoff.failures
            LOG.warning(
                "drafter %s is disabled for %.0f s: %s failed %d times in a row: %s", name, pause, method, count, words
            )
        now = self._clock()
        if name not in self._logged or now - self._logged[name] >= LOG_INTERVAL:
            self._logged[name] = now
            LOG.error("drafter %s failed in %s; the step runs without its drafts", name, method, exc_info=error)

    def succeed(self, name: str, method: str) -> None:
        """Reset the back-off of one method."""
        backoff = self._failing.pop((name, method), None)
        if backoff is not None and backoff.failures > TOLERATED and name not in self.disabled:
            LOG.warning("drafter %s is enabled again: %s succeeded", name, method)


def comes_from_signal(error: BaseException) -> bool:
    """Return whether an exception ends the program rather than a drafter's call.

    Python runs signal handlers in the main thread, between any two instructions. So Ctrl-C during a drafter's call is
    a KeyboardInterrupt there, and what a handler of the program raises has passed the handler's frame.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt) or _passed_handler(error)


def _passed_handler(error: BaseException) -> bool:
    """Return whether a frame of an installed signal handler is in the traceback."""
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


class IsolatedDrafter(Wrapper):
    """A drafter of another package. It gets copies of sequences, so it cannot change the engine's own."""

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return self.inner.propose(_copies(seqs), list(budgets))

    def prepare(self, seqs: list[Sequence]) -> None:
        self.inner.prepare(_copies(seqs))

    def update_kv(self, results: list[StepResult]) -> None:
        super().update_kv([_with_copy(result) for result in results])

    def observe(self, results: list[StepResult]) -> None:
        self.inner.observe([_with_copy(result) for result in results])

    def forget(self, seq: Sequence) -> None:
        self.inner.forget(_copy(seq))


def is_builtin(drafter: Drafter) -> bool:
    """Return whether the class of a drafter, and of any drafter it wraps, belongs to this package."""
    own = type(drafter).__module__.partition(".")[0] == "foretell"
    return own and (not isinstance(drafter, Wrapper) or is_builtin(drafter.inner))


def isolate(drafter: Drafter) -> Drafter:
    """Wrap a single drafter of another package in `IsolatedDrafter`; return any other drafter as it is."""
    check_traits(drafter)
    return drafter if is_builtin(drafter) else IsolatedDrafter(drafter)


def _copy(seq: Sequence) -> Sequence:
    return replace(seq, tokens=list(seq.tokens), pages=list(seq.pages))


def _copies(seqs: list[Sequence]) -> list[Sequence]:
    return [_copy(seq) for seq in seqs]


def _with_copy(result: StepResult) -> StepResult:
    return replace(result, scheduled=replace(result.scheduled, seq=_copy(result.scheduled.seq)))


TOLERANCE = 1e-2  # tolerated rounding error of probabilities and their sums
INTEGERS = frozenset({int})


def check_drafts(proposed: Iterable[object], count: int, name: str) -> list[Draft]:
    """Return the drafts that a drafter proposed for `count` sequences; raise if one is malformed or missing."""
    drafts = [check_draft(draft, name) for draft in proposed]
    if len(drafts) != count:
        raise ValueError(f"{name} returned {len(drafts)} drafts for {count} sequences")
    return drafts


def check_draft(draft: object, name: str) -> Draft:
    """Return a draft of plain integers whose parents form a tree, or raise."""
    if draft is NO_DRAFT:
        return NO_DRAFT
    if not isinstance(draft, Draft):
        raise TypeError(f"{name} returned a {type(draft).__name__}, not a Draft")
    if draft.device_draft is not None:  # its tokens are still on the device
        return draft
    nodes = len(draft.tokens)
    if type(draft) is not Draft or not _has_plain_numbers(draft):
        draft = Draft(
            _integers(draft.tokens, "token", name),
            _integers(draft.parents, "parent", name),
            draft.source if isinstance(draft.source, str) else "",
            None if draft.sampled is None else tuple(bool(each) for each in draft.sampled),
            None if draft.confidence is None else tuple(float(each) for each in draft.confidence),
            draft.probs,
            draft.origins,
        )
    if draft.origins is not None and not all(isinstance(each, str) for each in draft.origins):
        raise TypeError(f"{name} named origins of draft tokens that are no strings")
    for part in (draft.parents, draft.sampled, draft.confidence, draft.origins):
        if part is not None and len(part) != nodes:
            raise ValueError(f"{name} described {len(part)} of {nodes} draft tokens")
    if not draft.is_chain and any(not -1 <= parent < node for node, parent in enumerate(draft.parents)):
        raise ValueError(f"{name} returned a draft token whose parent does not come before it")
    _check_confidence(draft.confidence, name)
    return draft


def _has_plain_numbers(draft: Draft) -> bool:
    """Return whether nothing has to be converted, as in drafts of built-in drafters."""
    own = type(draft.tokens) is tuple and type(draft.parents) is tuple and isinstance(draft.source, str)
    plain = own and INTEGERS.issuperset(map(type, draft.tokens)) and INTEGERS.issuperset(map(type, draft.parents))
    confidence, sampled = draft.confidence, draft.sampled
    return (
        plain
        and (confidence is None or (type(confidence) is tuple and set(map(type, confidence)) <= {float}))
        and (sampled is None or (type(sampled) is tuple and set(map(type, sampled)) <= {bool}))
    )


def _integers(numbers: Iterable[Any], what: str, name: str) -> tuple[int, ...]:
    """Convert integers of any library; a bool or a float is an error."""
    found = []
    for number in numbers:
        try:
            if isinstance(number, bool):
                raise TypeError
            found.append(operator.index(number))
        except (TypeError, ValueError):
            raise TypeError(f"{name} returned {number!r:.40} as a {what}, not an integer") from None
    return tuple(found)


def _check_confidence(confidence: tuple[float, ...] | None, name: str) -> None:
    if not confidence:
        return
    # A NaN makes the sum a NaN, which compares false.
    if not (min(confidence) >= 0 and max(confidence) <= 1 + TOLERANCE and sum(confidence) >= 0):
        raise ValueError(f"{name} gave a confidence outside 0 to 1")


def check_probs(draft: Draft, vocab: int, name: str, trusted: bool) -> Draft:
    """Return the draft with float32 probabilities; rows of sampled draft tokens must be distributions.

    Rows of a `trusted` drafter are not summed up: that takes up to a millisecond, and on a GPU waits for the device.
    """
    sampled = [node for node in range(len(draft)) if draft.is_sampled(node)]
    if draft.probs is None:
        if sampled:
            raise ValueError(f"{name} sampled draft tokens without the probabilities they were sampled from")
        return draft
    probs = draft.probs if isinstance(draft.probs, Tensor) else torch.as_tensor(draft.probs)
    if tuple(probs.shape) != (len(draft), vocab) or probs.is_complex():
        raise ValueError(f"{name} gave probabilities of shape {tuple(probs.shape)}, not {(len(draft), vocab)}")
    probs = probs.float()
    rows = probs if len(sampled) == len(draft) else probs[sampled]
    # A NaN makes both comparisons false.
    if sampled and not trusted and not bool(((rows.sum(-1) - 1).abs() <= TOLERANCE).all() & (rows >= 0).all()):
        raise ValueError(f"{name} gave probabilities that are negative, not finite or do not sum to 1")
    return replace(draft, probs=probs)
