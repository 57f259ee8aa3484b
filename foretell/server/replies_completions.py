"""Replies of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .answers import Answer
from .protocol import CompletionBody
from .replies import Reply

if TYPE_CHECKING:
    from foretell.engine.streams import Piece
    from foretell.types import TokenLogprob

    from .jobs import Job
    from .replies import House

Row = tuple[int, "TokenLogprob | None"]


class CompletionReply(Reply):
    """Texts, with their prompts in front where those are to be echoed."""

    kind = chunk_kind = "text_completion"

    def __init__(self, house: House, job: Job, body: CompletionBody, name: str, model: str) -> None:
        super().__init__(house, job, body, name, model)
        self.tells_logprobs = body.logprobs is not None
        self._offsets = [0] * len(self.answers)  # characters that were told with their log-probabilities

    def choice(self, answer: Answer) -> dict[str, Any]:
        rows = [*self._prompt_rows(answer), *self._rows(answer.tokens, answer.logprobs)]
        return {
            "index": answer.index,
            "text": self._echo(answer) + ("" if self.job.silent else answer.content),
            "logprobs": self._logprobs(answer, rows),
            "finish_reason": self._reason(answer),
            **self.told(answer),
        }

    def parts(self, answer: Answer, piece: Piece) -> Iterator[dict[str, Any]]:
        tokens = list(piece.delta.tokens)
        said = "".join(part.text for part in answer.add(piece))
        text, rows = "" if self.job.silent else said, self._rows(tokens, list(piece.delta.logprobs or ()))
        if piece.first:
            text, rows = self._echo(answer) + text, [*self._prompt_rows(answer), *rows]
        if text or self.tells_logprobs or self.tells_tokens:
            told = self.told(answer, piece)
            yield {"text": text, "logprobs": self._logprobs(answer, rows), "finish_reason": None, **told}
        if answer.finish is not None:
            yield {"text": "", "logprobs": None, "finish_reason": self._reason(answer)}

    def _reason(self, answer: Answer) -> str:
        return "length" if self.job.silent else answer.finish_reason

    def _echo(self, answer: Answer) -> str:
        return self.job.prompts[answer.index // answer.request.params.n] if self.job.prompts else ""

    def _rows(self, tokens: list[int], found: list[TokenLogprob]) -> list[Row]:
        return list(zip(tokens, found, strict=True)) if self.tells_logprobs and not self.job.silent else []

    def _prompt_rows(self, answer: Answer) -> list[Row]:
        """Of an echoed prompt; nothing foretells its first token."""
        if not self.job.prompts or not self.tells_logprobs:
            return []
        return [(token, answer.prompt_logprobs.get(place)) for place, token in enumerate(answer.request.prompt)]

    def _logprobs(self, answer: Answer, rows: list[Row]) -> dict[str, Any] | None:
        if not self.tells_logprobs:
            return None
        found = self.logprobs.completion(rows, self._offsets[answer.index])
        self._offsets[answer.index] += sum(len(self.house.tokenizer.token_text(token)) for token, _ in rows)
        return found
