"""Guesses of a small model made from the target, over tokens alone: it can read ahead of the target."""

from __future__ import annotations

from typing import Any

from foretell.draft.draft_builder import ChainBuilder
from foretell.draft.heads.eagle import EagleDrafter
from foretell.runner.native.head_draft import PrefillBuffers
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Sequence, StepResult


class DistilledDrafter(EagleDrafter):
    """Where the library guesses, what is to be read goes with the first guess, and what was guessed and stood is not
    read again: a place is remembered by its tokens alone, to the last bit, whoever came upon them."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._unread: list[PrefillRange] = []
        self._guessed: dict[int, list[int]] = {}  # by sequence, the chains of the step that is under way

    def catch_up(self, readings: list[PrefillRange]) -> None:
        self._guessed = {}
        if self._native is None or self._reader is None:
            super().catch_up(readings)
        else:
            self._unread = readings

    def along(self) -> PrefillBuffers | None:
        readings, self._unread = self._unread, []
        return self._reader.pack(readings) if self._reader is not None and readings else None

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        chains = super().guess(seqs, budgets)
        if self._native is not None:
            self._guessed = {seq.id: chain.tokens for seq, chain in zip(seqs, chains, strict=True)}
        return chains

    def update_kv(self, outcomes: list[StepResult]) -> None:
        super().update_kv(outcomes)
        self._guessed = {}

    def known_of(self, outcome: StepResult) -> int:
        draft, guessed = outcome.draft, self._guessed.get(outcome.scheduled.seq.id, [])
        if draft.source != self.name or list(draft.tokens) != guessed[: len(draft)]:
            return 0
        # The text's last token was looked at, and all guesses but the last.
        return min(len(guessed), outcome.scheduled.seq.cached - outcome.scheduled.start)
