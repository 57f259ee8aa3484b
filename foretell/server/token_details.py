"""Per-token fields of a response: OpenAI's logprobs, and the token details and rounds of speculative decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from foretell.types import TARGET

from .choice_state import skip_reason
from .metrics import PlainSeconds, plain_step_seconds

if TYPE_CHECKING:
    from foretell.engine.streams import StepTiming, StreamItem
    from foretell.server.openai.requests import GenerationRequest
    from foretell.tokenizer import StreamDecoder, Tokenizer
    from foretell.types import Delta, RejectedToken, TokenDetail, TokenLogprob

PROBABILITY_DIGITS = 6  # decimal places of probabilities in responses
MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON does not have

LogprobRow = tuple[int, "TokenLogprob | None", int]  # a token, its logprobs, and the characters it adds to the text
Details = dict[str, list[Any]]  # fields of a choice


class LogprobFormatter:
    """Formats logprobs in the shapes of OpenAI's two APIs; tokens as text, or as `token:ID` if `as_ids`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self.tokenizer, self.as_ids = tokenizer, as_ids

    def chat(self, rows: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the `logprobs` of a chat completion's choice."""
        return {"content": [self._chat_row(row) for row in rows], "refusal": None}

    def _chat_row(self, row: TokenLogprob) -> dict[str, Any]:
        top = [self._chat_entry(token, logprob) for token, logprob in row.top]
        return {**self._chat_entry(row.token, row.logprob), "top_logprobs": top}

    def with_ids(self, rows: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return llama.cpp's `completion_probabilities`."""
        return [
            {
                "id": row.token,
                **self._chat_row(row),
                "top_logprobs": [{"id": token, **self._chat_entry(token, logprob)} for token, logprob in row.top],
            }
            for row in rows
        ]

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        token_bytes = self.tokenizer.token_bytes(token)
        return {"token": self._text(token), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(token_bytes)}

    def completion(self, rows: Sequence[LogprobRow], offset: int = 0) -> dict[str, Any]:
        """Return the `logprobs` of a completion's choice; `offset` is the position of the first token in the text."""
        lengths = [length for _, _, length in rows]
        return {
            "tokens": [self._key(token) for token, _, _ in rows],
            "token_logprobs": [None if row is None else max(row.logprob, MIN_LOGPROB) for _, row, _ in rows],
            "top_logprobs": [None if row is None else self._top_logprobs(row) for _, row, _ in rows],
            "text_offset": list(accumulate(lengths, initial=offset))[:-1],
        }

    def _top_logprobs(self, row: TokenLogprob) -> dict[str, float]:
        """Return the top-k tokens and the sampled one; of two tokens with the same text the more likely counts."""
        logprobs: dict[str, float] = {}
        for token, logprob in (*row.top, (row.token, row.logprob)):
            logprobs.setdefault(self._key(token), max(logprob, MIN_LOGPROB))
        return logprobs

    def _text(self, token: int) -> str:
        return f"token:{token}" if self.as_ids else self.tokenizer.token_text(token)

    def _key(self, token: int) -> str:
        """Return the token's text as a dictionary key. Incomplete UTF-8 is shown as bytes, to keep keys distinct."""
        if self.as_ids:
            return f"token:{token}"
        token_bytes = self.tokenizer.token_bytes(token)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class TokenDetailFormatter:
    """Formats the token details of one choice, item by item, as its request asks for them."""

    def __init__(
        self,
        body: GenerationRequest,
        tokenizer: Tokenizer,
        decoder: StreamDecoder,
        probability_drafters: Collection[str],
        plain_seconds: PlainSeconds,
    ) -> None:
        """`decoder` decodes this choice's tokens; `probability_drafters` have probabilities as their confidence."""
        self.body, self.tokenizer, self.decoder = body, tokenizer, decoder
        self.probability_drafters, self.plain_seconds = probability_drafters, plain_seconds
        self.collected: Details = defaultdict(list)

    def append(self, item: StreamItem) -> None:
        """Collect the details of an item for a response that is sent complete."""
        for name, rows in self.format(item).items():
            self.collected[name] += rows

    def format(self, item: StreamItem) -> Details:
        """Return the fields for one item, which is one round."""
        delta, body, details = item.delta, self.body, Details()
        texts = self._token_texts(delta)
        if body.return_token_origin:
            details |= {"token_ids": list(delta.tokens), "token_origins": list(delta.origins), "token_texts": texts}
        if body.return_token_details:
            is_probability = delta.drafter in self.probability_drafters
            rows = zip(delta.tokens, texts, delta.origins, delta.details or (), strict=True)
            details["token_details"] = [self._token(*row, is_probability) for row in rows]
        if body.return_rounds or body.return_token_details:
            details["rounds"] = [self._round(item)] if delta.tokens else []
        return details

    def _token_texts(self, delta: Delta) -> list[str]:
        """Return the characters each token adds. An incomplete character at the end goes to the last token."""
        texts = [self.decoder.push([token]) for token in delta.tokens]
        if delta.finish_reason is not None and texts:
            texts[-1] += self.decoder.flush()
        return texts

    def _token(self, token: int, text: str, origin: str, detail: TokenDetail, is_probability: bool) -> dict[str, Any]:
        return {
            "id": token,
            "text": text,
            "origin": origin,
            **_probabilities(detail.probability, detail.confidence, is_probability),
            "rejected": [self._rejected(rejected, is_probability) for rejected in detail.rejected],
        }

    def _rejected(self, rejected: RejectedToken, is_probability: bool) -> dict[str, Any]:
        return {
            "id": rejected.token,
            "text": self.tokenizer.token_text(rejected.token),
            **_probabilities(rejected.probability, rejected.confidence, is_probability),
        }

    def _round(self, item: StreamItem) -> dict[str, Any]:
        delta = item.delta
        return {
            "tokens": len(delta.tokens),
            "drafted": delta.num_drafted,
            "accepted": sum(origin != TARGET for origin in delta.origins),
            "drafter": delta.drafter or None,
            "skipped": None if delta.num_drafted else skip_reason(item),
            **({} if item.timing is None else self._times(item, item.timing)),
        }

    def _times(self, item: StreamItem, timing: StepTiming) -> dict[str, Any]:
        """Return the step's times in milliseconds; `at_ms` counts from the start of the sequence's prefill."""
        started = item.state.timings.started or timing.ended_at
        plain = plain_step_seconds(self.plain_seconds, timing)
        return {
            "at_ms": _ms(timing.ended_at - started),
            "step_ms": _ms(timing.seconds),
            "drafting_ms": _ms(timing.times.draft_seconds),
            "target_ms": _ms(timing.times.target_seconds),
            "plain_ms": None if plain is None else _ms(plain),
            "texts": timing.num_sequences,
        }


def _probabilities(target: float, confidence: float | None, is_probability: bool) -> dict[str, Any]:
    """Return the target's probability and the drafter's confidence, the latter also as probability if it is one."""
    shown = _shorten(confidence)
    return {
        "probability": _shorten(target),
        "draft_confidence": shown,
        "draft_probability": shown if is_probability else None,
    }


def _shorten(probability: float | None) -> float | None:
    return None if probability is None else round(probability, PROBABILITY_DIGITS)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
