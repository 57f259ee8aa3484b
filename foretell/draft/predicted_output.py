"""Copies the text that the caller expects, and finds the way back into it after an edit."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

from foretell.types import Budget, Draft, DrafterTraits, Sequence

from .base import Drafter

RUNS = (3, 2, 1)  # tokens that tell a place in the prediction
ENTRY = 240  # bytes of a run in the index: its tuple, its list of places, its entry


@dataclass(slots=True)
class _Pointer:
    """Where in the prediction the text is: a value of the tokens written so far, and of nothing else."""

    prediction: tuple[int, ...]
    reach: int
    read: int = 0  # written tokens it has followed
    place: int | None = 0  # of the token that is expected next; None: the text has departed
    trusted: int = 0  # the last place that more than one token spoke for
    followed: int = 4  # tokens that came as expected since it last sought its place; a text's beginning is likely
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # behind each run, in order

    def __post_init__(self) -> None:
        tokens = self.prediction
        for end in range(1, len(tokens) + 1):
            for length in RUNS:
                if length <= end:
                    self.places.setdefault(tokens[end - length : end], []).append(end)

    def follow(self, tokens: list[int], start: int) -> None:
        """Go on with what was written since; the text starts at `start`."""
        for end in range(start + self.read + 1, len(tokens) + 1):
            if self._expects(tokens[end - 1]):
                self.place = self.trusted = (self.place or 0) + 1
                self.followed += 1
            else:
                self._seek(tokens[max(start, end - RUNS[0]) : end])
        self.read = len(tokens) - start

    def _expects(self, token: int) -> bool:
        return self.place is not None and self.place < len(self.prediction) and self.prediction[self.place] == token

    def _seek(self, tail: list[int]) -> None:
        """Find how the text ends in the prediction: the longest run, the nearest place ahead, else behind."""
        self.place, self.followed = None, 0
        for length in RUNS[-len(tail) :]:
            places = self.places.get(tuple(tail[-length:]))
            if places and self._believes(place := self._nearest(places), length, len(places)):
                self.place = place
                if length > 1:  # a comma found by chance must not lead the search astray
                    self.trusted = place
                return

    def _nearest(self, places: list[int]) -> int:
        ahead = bisect_right(places, self.trusted)
        return places[ahead] if ahead < len(places) else places[-1]

    def _believes(self, place: int, length: int, found: int) -> bool:
        """The longer a run, the farther it may be found; one that occurs once may be anywhere."""
        distance = place - self.trusted
        return found == 1 or (length > 1 or distance > 0) and abs(distance) <= self.reach**length


class PredictedOutputDrafter(Drafter):
    """The request's own prediction as the draft; where the text departs from it, nothing until it is found again."""

    name = "prediction"
    traits = DrafterTraits(is_free=True, prior_acceptance=0.85)  # a request with a prediction expects it to hold

    def __init__(self, reach: int = 16) -> None:
        """`reach`: how far ahead a token that occurs more than once may be found; its power for a run of them."""
        self.reach = reach
        self._pointers: dict[int, _Pointer] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self._guess(seq, budget.depth) if budget.nodes and seq.request.prediction else Draft()
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _guess(self, seq: Sequence, nodes: int) -> Draft:
        pointer = self._catch_up(seq)
        if pointer.place is None:
            return Draft()
        copied = Draft.chain(pointer.prediction[pointer.place : pointer.place + nodes], self.name)
        return replace(copied, confidence=(1 - 1 / (1 + pointer.followed),) * len(copied))

    def _catch_up(self, seq: Sequence) -> _Pointer:
        pointer = self._pointers.get(seq.id)
        if pointer is None:
            pointer = self._pointers[seq.id] = _Pointer(seq.request.prediction, self.reach)
        pointer.follow(seq.tokens, len(seq.request.prompt))
        return pointer

    def forget(self, seq: Sequence) -> None:
        self._pointers.pop(seq.id, None)

    @property
    def memory(self) -> int:
        return sum(len(pointer.places) * ENTRY for pointer in self._pointers.values())
