"""Per-request SLOs: a minimum speed or a deadline, and which sequences are late."""

from __future__ import annotations

from collections.abc import Callable

from foretell.types import Sequence

from .settings import ControllerTuning


def has_slo(seq: Sequence) -> bool:
    """Return whether the request asks for a minimum speed or a deadline."""
    choice = seq.request.speculation
    return choice.min_tokens_per_second is not None or choice.deadline is not None


class SloTracker:
    """Tracks when each sequence with an SLO was admitted and when its first token came."""

    def __init__(self, clock: Callable[[], float], tuning: ControllerTuning = ControllerTuning()) -> None:
        self.clock, self.tuning = clock, tuning
        self._since: dict[int, tuple[float, float | None]] = {}  # by sequence: admission and first token, in seconds
        self._best: dict[int, tuple[float, float]] = {}  # by sequence: tokens/s of the best plan, and its expiry

    def late(self, seqs: list[Sequence], plain_seconds: float) -> list[Sequence]:
        """Return the sequences that will miss their SLO at their current speed, but can still meet it."""
        watched = [seq for seq in seqs if has_slo(seq)]
        if not watched:
            return []
        now = self.clock()
        return [seq for seq in watched if self._is_late(seq, now, plain_seconds)]

    def can_catch_up(self, seq: Sequence, plain_seconds: float, best: float) -> bool:
        """Return whether `seq` is late and can still meet its SLO with a plan of `best` tokens per second."""
        now = self.clock()
        self._best[seq.id] = (best, now + self.tuning.slo_hold_seconds)
        return self._is_late(seq, now, plain_seconds)

    def _is_late(self, seq: Sequence, now: float, plain_seconds: float) -> bool:
        tuning = self.tuning
        began, first = self._since.get(seq.id, (now, None))
        if first is None and seq.num_output_tokens:
            first = now
        self._since[seq.id] = (began, first)
        if first is None:
            return False  # still in prefill, which drafts cannot speed up
        choice, elapsed, num_output = seq.request.speculation, now - first, seq.num_output_tokens
        min_speed, deadline = choice.min_tokens_per_second, choice.deadline
        best, expiry = self._best.get(seq.id, (0.0, now))
        fastest = tuning.slo_optimism * best if now < expiry else float("inf")
        if min_speed is not None and min_speed <= fastest and num_output - 1 < tuning.slo_lead * min_speed * elapsed:
            return True
        if deadline is None or now + seq.remaining_tokens / fastest > began + deadline:
            return False  # there is no deadline, or it is missed in any case
        if num_output > 4 and elapsed:
            speed = (num_output - 1) / elapsed
        else:
            speed = 1 / plain_seconds if plain_seconds else float("inf")
        return now + tuning.slo_lead * seq.remaining_tokens / speed > began + deadline

    def forget(self, seq_id: int) -> None:
        """Drop the state of a finished sequence."""
        self._since.pop(seq_id, None)
        self._best.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._since)
