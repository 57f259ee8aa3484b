"""Texts that were promised a speed, and whether they keep it."""

from __future__ import annotations

from collections.abc import Callable

from foretell.types import Sequence

OPTIMISM = 1.25  # an SLO counts as out of reach only if it is faster than the best plan by this factor
RETRY = 1.0  # seconds for which the speed of a plan is taken to hold
AHEAD = 1.05  # a text is kept a little faster than it must be
KNOWN = 4  # tokens after which a text's own speed tells more than the price of a plain step


def is_promised(seq: Sequence) -> bool:
    """Whether a text asked for a speed."""
    choice = seq.request.speculation
    return choice.min_tokens_per_second is not None or choice.deadline is not None


class SloTracker:
    """Knows when each of these texts was taken up, and when its first token came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._since: dict[int, tuple[float, float | None]] = {}  # taken up, first token
        self._best: dict[int, tuple[float, float]] = {}  # tokens a second by the best plan, and until when that holds

    def behind(self, seqs: list[Sequence], plain: float) -> list[Sequence]:
        """Of the texts those that will miss what they asked for at their pace; a plain step takes `plain`."""
        promised = [seq for seq in seqs if is_promised(seq)]
        if not promised:
            return []
        now = self.clock()
        return [seq for seq in promised if self._is_behind(seq, now, plain)]

    def stays_behind(self, seq: Sequence, plain: float, best: float) -> bool:
        """Return whether `seq` is behind and can still meet its SLO, if its best plan gives `best` tokens a second."""
        now = self.clock()
        self._best[seq.id] = (best, now + RETRY)
        return self._is_behind(seq, now, plain)

    def _is_behind(self, seq: Sequence, now: float, plain: float) -> bool:
        began, first = self._since.get(seq.id, (now, None))
        if first is None and seq.num_output_tokens:
            first = now
        self._since[seq.id] = (began, first)
        if first is None:
            return False  # its prompt is still read, where there is nothing to guess
        choice, elapsed = seq.request.speculation, now - first
        floor, deadline = choice.min_tokens_per_second, choice.deadline
        best, until = self._best.get(seq.id, (0.0, now))
        fastest = OPTIMISM * best if now < until else float("inf")
        if floor is not None and floor <= fastest and seq.num_output_tokens - 1 < AHEAD * floor * elapsed:
            return True
        if deadline is None or now + seq.remaining_tokens / fastest > began + deadline:
            return False  # there is none, or it will be missed in any case
        pace = (
            (seq.num_output_tokens - 1) / elapsed
            if seq.num_output_tokens > KNOWN and elapsed
            else 1 / plain
            if plain
            else float("inf")
        )
        return now + AHEAD * seq.remaining_tokens / pace > began + deadline

    def forget(self, seq_id: int) -> None:
        self._since.pop(seq_id, None)
        self._best.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._since)
