"""A drafter with weights of its own, which gives their memory back while nobody uses it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from time import monotonic

import torch

from foretell.types import Budget, Draft, Sequence, StepResult

from .base import Drafter
from .supervisor import Backoff

LOG = logging.getLogger("foretell")

RETRY = 60.0  # seconds until the weights are loaded again after a failed load; each further failure doubles it
LONGEST_RETRY = 3600.0  # seconds


class Background:
    """Where work is done that no step waits for."""

    def start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="foretell-draft", daemon=True).start()

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.daemon = True
        timer.start()


class UnloadableDrafter(Drafter):
    """Another drafter while it is here. It leaves when it was not used for `idle` seconds, and comes back when called.

    A trial does not count as use: what is only ever tried does not pay for its room.
    """

    def __init__(
        self,
        inner: Drafter,
        make: Callable[[], Drafter],
        idle: float,
        background: Background = Background(),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`make` loads it again; it is called in the background."""
        assert not inner.traits.hidden_layers, "KV in the target's pages is lost with the weights"
        self.name, self.traits = inner.name, inner.traits
        self.idle, self._make, self._background, self._clock = idle, make, background, clock
        self._lock = threading.Lock()
        self._inner: Drafter | None = inner
        self._used, self._reload = clock(), Backoff(clock, tolerated=0, first=RETRY, longest=LONGEST_RETRY)
        self._loading = False
        self._watch(idle)

    @property
    def is_loaded(self) -> bool:
        return self._inner is not None

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        with self._lock:
            if self._inner is None:
                return [Draft()] * len(seqs)
            if any(budget.nodes and not budget.is_exploration for budget in budgets):
                self._used = self._clock()
            return self._inner.propose(seqs, budgets)

    def observe(self, outcomes: list[StepResult]) -> None:
        with self._lock:
            if self._inner is not None:
                self._inner.observe(outcomes)

    def forget(self, seq: Sequence) -> None:
        with self._lock:
            if self._inner is not None:
                self._inner.forget(seq)

    def load(self) -> None:
        with self._lock:
            if self._inner is not None or self._loading or self._reload.waiting:
                return
            self._loading = True
        LOG.info("%s is loaded again", self.name)
        self._background.start(self._load_weights)

    def _load_weights(self) -> None:
        inner: Drafter | None = None
        try:
            inner = self._make()
            self._reload.succeed()
        except BaseException as error:  # there may be no room for it now; an exit must not leave it loading for ever
            pause = self._reload.fail()
            LOG.warning("%s cannot come back: %s; next attempt in %.0f s", self.name, error, pause)
        with self._lock:
            self._inner, self._loading, self._used = inner, False, self._clock()
        if inner is not None:
            self._watch(self.idle)

    def rest(self) -> None:
        """Leave, if it was not used for so long; else look again when that may be."""
        with self._lock:
            left = self._used + self.idle - self._clock()
            if left <= 0:
                self._inner = None
        if left > 0:
            self._watch(left)
            return
        LOG.info("%s was not used for %.0f seconds and gives its memory back", self.name, self.idle)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _watch(self, seconds: float) -> None:
        """A timer must not keep an engine alive that nobody holds any more."""
        me = weakref.ref(self)

        def look() -> None:
            here = me()
            if here is not None:
                here.rest()

        self._background.later(seconds, look)
