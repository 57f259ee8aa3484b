"""Scripted drafters, for tests and to measure the engine at a known acceptance rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens

from foretell.draft.base import Drafter
from foretell.types import NO_DRAFT, Budget, Draft, Sequence


class ScriptedDrafter(Drafter):
    """Proposes the drafts that a function returns."""

    name = "scripted"

    def __init__(self, script: Callable[[Sequence, Budget], Draft]) -> None:
        self.script = script

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [
            self.script(seq, budget).truncate(budget.nodes) if budget.nodes else NO_DRAFT
            for seq, budget in zip(seqs, budgets, strict=True)
        ]


class OracleDrafter(Drafter):
    """Knows the output of each prompt and errs at a set rate, at positions that depend on the prompt alone."""

    name = "oracle"

    def __init__(self, outputs: Mapping[tuple[int, ...], Tokens[int]], vocab: int, error_rate: float = 0.0) -> None:
        """`outputs` are the target's output tokens by prompt."""
        if not 0 <= error_rate <= 1:
            raise ValueError(f"error_rate must be between 0 and 1, not {error_rate}")
        self.outputs, self.vocab, self.error_rate = outputs, vocab, error_rate
        self._draft_tokens: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # by sequence, with its prompt

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._chain(seq, budget.depth) for seq, budget in zip(seqs, budgets, strict=True)]

    def _chain(self, seq: Sequence, nodes: int) -> Draft:
        prompt, tokens = self._draft_tokens.get(seq.id, ((), []))
        if prompt is not seq.request.prompt:
            prompt = seq.request.prompt
            tokens = self._with_errors(prompt)
            self._draft_tokens[seq.id] = prompt, tokens
        return Draft.chain(tokens[seq.num_output_tokens : seq.num_output_tokens + nodes], self.name)

    def _with_errors(self, prompt: tuple[int, ...]) -> list[int]:
        """Return all draft tokens of a sequence; computed once, so that a step costs what the engine costs."""
        salt = sum(prompt)
        return [
            (token + 1) % self.vocab if self._errs(position, salt) else token
            for position, token in enumerate(self.outputs.get(prompt, ()))
        ]

    def forget(self, seq: Sequence) -> None:
        self._draft_tokens.pop(seq.id, None)

    def _errs(self, position: int, salt: int) -> bool:
        """Hash the position (SplitMix64): the same errors in every run and batch."""
        mixed = (position * 0x9E3779B97F4A7C15 + salt * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
        mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
        return (mixed >> 11) / (1 << 53) < self.error_rate
