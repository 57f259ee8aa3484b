"""Predicted outputs: copies the text that the caller expects, and realigns with it after an edit."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

from foretell.draft.base import Drafter
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence

NGRAM_LENGTHS = (3, 2, 1)  # tokens that identify a position in the prediction, longest first
ENTRY_BYTES = 240  # of an n-gram in the index: its tuple, its list of positions, its entry


@dataclass(slots=True)
class _Pointer:
    """The position in the prediction that a sequence has reached; a function of its output tokens alone."""

    prediction: tuple[int, ...]
    max_jump: int
    num_read: int = 0  # output tokens that were followed
    position: int | None = 0  # of the expected next token; None: the output has departed from the prediction
    trusted: int = 0  # the last position that more than one token confirmed
    num_matched: int = 4  # expected tokens since the last realignment; starts above 0: a first token is likely right
    positions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # after each n-gram, ascending

    def __post_init__(self) -> None:
        tokens = self.prediction
        for end in range(1, len(tokens) + 1):
            for length in NGRAM_LENGTHS:
                if length <= end:
                    self.positions.setdefault(tokens[end - length : end], []).append(end)

    def follow(self, tokens: list[int], start: int) -> None:
        """Follow the tokens that are new; the output starts at index `start`."""
        for end in range(start + self.num_read + 1, len(tokens) + 1):
            if self._expects(tokens[end - 1]):
                self.position = self.trusted = (self.position or 0) + 1
                self.num_matched += 1
            else:
                self._realign(tokens[max(start, end - NGRAM_LENGTHS[0]) : end])
        self.num_read = len(tokens) - start

    def _expects(self, token: int) -> bool:
        position = self.position
        return position is not None and position < len(self.prediction) and self.prediction[position] == token

    def _realign(self, tail: list[int]) -> None:
        """Find the last output tokens in the prediction: the longest n-gram, at the nearest later position, else at the
        last one."""
        self.position, self.num_matched = None, 0
        for length in NGRAM_LENGTHS[-len(tail) :]:
            positions = self.positions.get(tuple(tail[-length:]))
            if positions and self._is_plausible(position := self._nearest(positions), length, len(positions)):
                self.position = position
                if length > 1:  # a comma found by chance must not mislead the search
                    self.trusted = position
                return

    def _nearest(self, positions: list[int]) -> int:
        ahead = bisect_right(positions, self.trusted)
        return positions[ahead] if ahead < len(positions) else positions[-1]

    def _is_plausible(self, position: int, length: int, count: int) -> bool:
        """Return whether a jump is believed: a longer n-gram may be further away, a unique one anywhere."""
        distance = position - self.trusted
        return count == 1 or (length > 1 or distance > 0) and abs(distance) <= self.max_jump**length


class PredictedOutputDrafter(Drafter):
    """Drafts the request's own prediction; where the output departs from it, nothing until it is found again."""

    name = "prediction"
    traits = DrafterTraits(is_free=True, prior_acceptance=0.85)  # a request with a prediction expects it to hold

    def __init__(self, max_jump: int = 16) -> None:
        """`max_jump`: tokens that a repeated token may be away; for an n-gram, this to the power of n."""
        self.max_jump = max_jump
        self._pointers: dict[int, _Pointer] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self._draft(seq, budget.depth) if budget.nodes and seq.request.prediction else NO_DRAFT
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def _draft(self, seq: Sequence, nodes: int) -> Draft:
        pointer = self._catch_up(seq)
        if pointer.position is None:
            return NO_DRAFT
        draft = Draft.chain(pointer.prediction[pointer.position : pointer.position + nodes], self.name)
        return replace(draft, confidence=(1 - 1 / (1 + pointer.num_matched),) * len(draft))

    def _catch_up(self, seq: Sequence) -> _Pointer:
        pointer = self._pointers.get(seq.id)
        if pointer is None:
            pointer = self._pointers[seq.id] = _Pointer(seq.request.prediction, self.max_jump)
        pointer.follow(seq.tokens, len(seq.request.prompt))
        return pointer

    def forget(self, seq: Sequence) -> None:
        self._pointers.pop(seq.id, None)

    @property
    def memory(self) -> int:
        """Bytes of the indices of all predictions."""
        return sum(len(pointer.positions) * ENTRY_BYTES for pointer in self._pointers.values())
