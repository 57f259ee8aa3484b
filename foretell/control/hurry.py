"""Texts that were promised a speed, and whether they keep it."""

from __future__ import annotations

from collections.abc import Callable

from foretell.types import Sequence

AHEAD = 1.05  # a text is kept a little faster than it must be
KNOWN = 4  # tokens after which a text's own speed tells more than the price of a plain step


def is_promised(seq: Sequence) -> bool:
    """Whether a text asked for a speed."""
    choice = seq.request.speculation
    return choice.min_tokens_per_second is not None or choice.deadline is not None


class Hurry:
    """Knows when each of these texts was taken up, and when its first token came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._since: dict[int, tuple[float, float | None]] = {}  # taken up, first token

    def behind(self, seqs: list[Sequence], plain: float) -> list[Sequence]:
        """Of the texts those that will miss what they asked for at their pace; a plain step takes `plain`."""
        promised = [seq for seq in seqs if is_promised(seq)]
        if not promised:
            return []
        now = self.clock()
        return [seq for seq in promised if self._is_behind(seq, now, plain)]

    def _is_behind(self, seq: Sequence, now: float, plain: float) -> bool:
        began, first = self._since.get(seq.id, (now, None))
        if first is None and seq.written:
            first = now
        self._since[seq.id] = (began, first)
        if first is None:
            return False  # its prompt is still read, where there is nothing to guess
        choice, elapsed = seq.request.speculation, now - first
        floor, deadline = choice.min_tokens_per_second, choice.deadline
        if floor is not None and seq.written - 1 < AHEAD * floor * elapsed:
            return True
        if deadline is None:
            return False
        pace = (seq.written - 1) / elapsed if seq.written > KNOWN and elapsed else 1 / plain if plain else float("inf")
        return now + AHEAD * seq.room / pace > began + deadline

    def forget(self, seq_id: int) -> None:
        self._since.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._since)
