"""Drafters that say what they are told: for tests, and for measuring the engine at a known acceptance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens

from foretell.types import Budget, Draft, Sequence

from .base import Drafter


class ScriptedDrafter(Drafter):
    """Proposes what a function says."""

    name = "scripted"

    def __init__(self, script: Callable[[Sequence, Budget], Draft]) -> None:
        self.script = script

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self.script(seq, budget).truncate(budget.nodes) if budget.nodes else Draft()
            for seq, budget in zip(seqs, budgets, strict=True)
        ]


class OracleDrafter(Drafter):
    """Knows each text and errs with a set rate, at places that depend on the position alone."""

    name = "oracle"

    def __init__(self, texts: Mapping[tuple[int, ...], Tokens[int]], vocab: int, error_rate: float = 0.0) -> None:
        """`texts`: what is written after each prompt."""
        if not 0 <= error_rate <= 1:
            raise ValueError(f"error_rate must be between 0 and 1, not {error_rate}")
        self.texts, self.vocab, self.error_rate = texts, vocab, error_rate
        self._guesses: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # by sequence, with its prompt

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._guess(seq, budget.depth) for seq, budget in zip(seqs, budgets, strict=True)]

    def _guess(self, seq: Sequence, nodes: int) -> Draft:
        prompt, guesses = self._guesses.get(seq.id, ((), []))
        if prompt is not seq.request.prompt:
            prompt, guesses = self._guesses[seq.id] = seq.request.prompt, self._all_guesses(seq.request.prompt)
        return Draft.chain(guesses[seq.num_output_tokens : seq.num_output_tokens + nodes], self.name)

    def _all_guesses(self, prompt: tuple[int, ...]) -> list[int]:
        """Worked out once for a text: a step is to cost what the engine costs."""
        salt = sum(prompt)
        return [
            (token + 1) % self.vocab if self._errs(place, salt) else token
            for place, token in enumerate(self.texts.get(prompt, ()))
        ]

    def forget(self, seq: Sequence) -> None:
        self._guesses.pop(seq.id, None)

    def _errs(self, place: int, salt: int) -> bool:
        # A fixed hash of the place: the same guesses every run, whatever the batch.
        scrambled = (place * 0x9E3779B97F4A7C15 + salt * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        scrambled = ((scrambled ^ (scrambled >> 31)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        return (scrambled >> 11) / (1 << 53) < self.error_rate
