"""One line of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .drafter_cost import Round, break_even
from .memory import GIB, Memory, memory_of
from .query import PlanQuery

MILLION, HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class Row:
    """One batch at one context."""

    texts: int
    context: int
    plain: Round
    guessed: Round
    break_even: float | None  # of the length taken; of the shortest where none pays
    memory: Memory
    copies: int
    dollars_per_hour: float

    @property
    def ratio(self) -> float:
        return self.guessed.rate / self.plain.rate

    def tokens_per_second(self, one: Round) -> float:
        """Of all texts."""
        return self.texts * one.rate

    def dollars(self, one: Round) -> float:
        """For a million tokens, while so many texts are always being written."""
        return self.dollars_per_hour / HOUR / self.tokens_per_second(one) * MILLION

    def as_json(self) -> dict[str, Any]:
        return {
            "batch": self.texts,
            "context": self.context,
            "plain_step_ms": 1e3 * self.plain.seconds,
            "length": self.guessed.length,
            "step_ms": 1e3 * self.guessed.seconds,
            "drafting_ms": 1e3 * self.guessed.drafting,
            "verifying_ms": 1e3 * self.guessed.verifying,
            "host_ms": 1e3 * self.guessed.host,
            "accepted_per_step": self.guessed.tokens,
            "speedup": self.ratio,
            "break_even_acceptance": self.break_even,
            "tokens_per_second": self.tokens_per_second(self.guessed),
            "plain_tokens_per_second": self.tokens_per_second(self.plain),
            "tokens_per_second_a_text": self.guessed.rate,
            "fits": self.memory.fits,
            "memory_gib": self.memory.total / GIB,
            "most_texts": self.memory.most_texts * self.copies,
            "dollars_per_million_tokens": self.dollars(self.guessed),
            "plain_dollars_per_million_tokens": self.dollars(self.plain),
        }


def row_of(question: PlanQuery, texts: int, context: int) -> Row:
    """One batch, shared out over the copies of the model."""
    plain = question.plain(texts, context)
    if question.length is None:
        guessed = question.best(texts, context, question.acceptance)
    else:
        guessed = question.round(texts, context, question.length)
    even = break_even(plain, guessed if guessed.length else question.round(texts, context, 1))
    memory = memory_of(question.target, question.guesser, -(-texts // question.copies), context, guessed.length)
    return Row(texts, context, plain, guessed, even, memory, question.copies, question.dollars_per_hour)
