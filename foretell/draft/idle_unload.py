"""Unloads the weights of a drafter while it is not used, and loads them again in the background."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from time import monotonic

import torch

from foretell.draft.base import Drafter
from foretell.draft.supervisor import Backoff
from foretell.types import NO_DRAFT, Budget, Draft, Sequence, StepResult

LOG = logging.getLogger("foretell")

RETRY = 60.0  # seconds until the weights are loaded again after a failed load; each further failure doubles it
LONGEST_RETRY = 3600.0  # seconds


class Background:
    """Runs work in threads that no step waits for."""

    def start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="foretell-draft", daemon=True).start()

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.daemon = True
        timer.start()


class UnloadableDrafter(Drafter):
    """A drafter whose weights are unloaded after `idle` seconds without use, and loaded again on request.

    Exploration does not count as use: a drafter that is only explored is not worth its memory.
    """

    def __init__(
        self,
        inner: Drafter,
        make: Callable[[], Drafter],
        idle: float,
        background: Background = Background(),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`make` loads the drafter again; it runs in the background."""
        assert not inner.traits.hidden_layers, "a head's KV in the target's pages would be lost with its weights"
        self.name, self.traits = inner.name, inner.traits
        self.idle, self._make, self._background, self._clock = idle, make, background, clock
        self._lock = threading.Lock()
        self._inner: Drafter | None = inner
        self._last_used = clock()
        self._reload = Backoff(clock, tolerated=0, first=RETRY, longest=LONGEST_RETRY)
        self._is_loading = False
        self._check_later(idle)

    @property
    def is_loaded(self) -> bool:
        """Return whether the weights are loaded."""
        return self._inner is not None

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        with self._lock:
            if self._inner is None:
                return [NO_DRAFT] * len(seqs)
            if any(budget.nodes and not budget.is_exploration for budget in budgets):
                self._last_used = self._clock()
            return self._inner.propose(seqs, budgets)

    def observe(self, results: list[StepResult]) -> None:
        with self._lock:
            if self._inner is not None:
                self._inner.observe(results)

    def forget(self, seq: Sequence) -> None:
        with self._lock:
            if self._inner is not None:
                self._inner.forget(seq)

    def load(self) -> None:
        """Load the weights in the background, unless they are loaded, or a failed load is too recent."""
        with self._lock:
            if self._inner is not None or self._is_loading or self._reload.waiting:
                return
            self._is_loading = True
        LOG.info("%s is being loaded again", self.name)
        self._background.start(self._load_weights)

    def _load_weights(self) -> None:
        inner: Drafter | None = None
        try:
            inner = self._make()
            self._reload.succeed()
        except BaseException as error:  # there may be no memory now; an exit must not leave it loading forever
            pause = self._reload.fail()
            LOG.warning("%s cannot be loaded: %s; next attempt in %.0f s", self.name, error, pause)
        with self._lock:
            self._inner, self._is_loading, self._last_used = inner, False, self._clock()
        if inner is not None:
            self._check_later(self.idle)

    def unload_if_idle(self) -> None:
        """Drop the weights if they were not used for `idle` seconds; else check again when that time is over."""
        with self._lock:
            left = self._last_used + self.idle - self._clock()
            if left <= 0:
                self._inner = None
        if left > 0:
            self._check_later(left)
            return
        LOG.info("%s was not used for %.0f s; its weights are unloaded", self.name, self.idle)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _check_later(self, seconds: float) -> None:
        """Start a timer that holds no reference: it must not keep an unused engine alive."""
        reference = weakref.ref(self)

        def check() -> None:
            drafter = reference()
            if drafter is not None:
                drafter.unload_if_idle()

        self._background.later(seconds, check)
