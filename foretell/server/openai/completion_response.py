"""Replies of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foretell.engine.detokenizer import decoder_for
from foretell.server.choice_state import ChoiceState
from foretell.server.openai.requests import CompletionBody
from foretell.server.openai.response_builder import ResponseBuilder
from foretell.server.parsers.base import Kind, OutputPart
from foretell.server.sse import BLANK
from foretell.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem
    from foretell.server.logprobs import Row
    from foretell.server.openai.response_builder import ResponseContext
    from foretell.server.preprocess import GenerationJob
    from foretell.types import TokenLogprob


class CompletionResponseBuilder(ResponseBuilder):
    """Texts, with their prompts in front where those are to be echoed."""

    kind = chunk_kind = "text_completion"

    def __init__(self, house: ResponseContext, job: GenerationJob, body: CompletionBody, name: str, model: str) -> None:
        super().__init__(house, job, body, name, model)
        self.tells_logprobs = body.logprobs is not None
        self._offsets = [0] * len(self.answers)  # characters that were told with their log-probabilities
        told = self.answers if self.tells_logprobs else []
        self._spelt = [decoder_for(answer.request, house.tokenizer) for answer in told]

    def choice(self, answer: ChoiceState) -> dict[str, Any]:
        rows = [*self._prompt_rows(answer), *self._rows(answer, answer.tokens, answer.logprobs)]
        return {
            "index": answer.index,
            "text": self._echo(answer) + ("" if self.job.silent else answer.content),
            "logprobs": self._logprobs(answer, rows),
            "finish_reason": self._reason(answer),
            **self.told(answer),
        }

    def spoken(self, kind: Kind) -> dict[str, Any] | None:
        return {"text": BLANK, "logprobs": None, "finish_reason": None}

    def parts(self, answer: ChoiceState, piece: StreamItem, said: list[OutputPart]) -> Iterator[dict[str, Any]]:
        tokens = list(piece.delta.tokens)
        words = "".join(part.text for part in said)
        text, rows = "" if self.job.silent else words, self._rows(answer, tokens, list(piece.delta.logprobs or ()))
        if piece.is_first:
            text, rows = self._echo(answer) + text, [*self._prompt_rows(answer), *rows]
        if text or self.tells_logprobs or self.tells_tokens:
            told = self.told(answer, piece)
            yield {"text": text, "logprobs": self._logprobs(answer, rows), "finish_reason": None, **told}
        if answer.finish is not None:
            yield {"text": "", "logprobs": None, "finish_reason": self._reason(answer)}

    def _reason(self, answer: ChoiceState) -> str:
        return "length" if self.job.silent else answer.finish_reason

    def _echo(self, answer: ChoiceState) -> str:
        return self.job.prompts[answer.index // answer.request.params.n] if self.job.prompts else ""

    def _rows(self, answer: ChoiceState, tokens: list[int], found: list[TokenLogprob]) -> list[Row]:
        if not self.tells_logprobs or self.job.silent:
            return []
        spelt = self._spelt[answer.index]
        return [(token, row, len(spelt.push([token]))) for token, row in zip(tokens, found, strict=True)]

    def _prompt_rows(self, answer: ChoiceState) -> list[Row]:
        """Of an echoed prompt; nothing foretells its first token."""
        if not self.job.prompts or not self.tells_logprobs:
            return []
        tokens, tokenizer = answer.request.prompt, self.house.tokenizer
        spelt = StreamDecoder(tokenizer, skip_special=False)
        lengths = [len(spelt.push([token])) for token in tokens]
        lengths[-1] += len(spelt.flush())
        if tokens[0] == tokenizer.bos_id and not self._echo(answer).startswith(tokenizer.token_text(tokens[0])):
            lengths[0] = 0  # the model has it so, the text that was sent has it not
        found = [answer.prompt_logprobs.get(place) for place in range(len(tokens))]
        return list(zip(tokens, found, lengths, strict=True))

    def _logprobs(self, answer: ChoiceState, rows: list[Row]) -> dict[str, Any] | None:
        if not self.tells_logprobs:
            return None
        found = self.logprobs.completion(rows, self._offsets[answer.index])
        self._offsets[answer.index] += sum(length for _, _, length in rows)
        return found
