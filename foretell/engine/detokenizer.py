"""Incremental detokenization and stop checks of one sequence."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple

from foretell.tokenizer import StreamDecoder, Tokenizer
from foretell.types import FinishReason, Request

PROMPT_TAIL = 8  # prompt tokens that the decoder sees first, because they affect the text of the first output token


class AppendResult(NamedTuple):
    """The number of a step's tokens that were appended, and why the sequence finished, if it did."""

    num_appended: int
    finish_reason: FinishReason | None


class Detokenizer:
    """Turns output tokens into text and finishes at stop tokens, stop strings and `max_tokens`.

    Text that may be the start of a stop string is held back. Tokens are appended during a step and decoded when the
    text is asked for, so that decoding does not delay the next step; only stop strings need it at once.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.decoder = None if tokenizer is None else decoder_for(request, tokenizer)
        self.stop_strings = request.params.stop
        self.stop_token_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            self.stop_token_ids |= request.end_ids
        self.num_tokens = 0
        self.text = ""  # all text returned so far
        self.matched_stop: str | None = None  # the stop string at which the sequence finished
        self._undecoded: list[int] = []
        self._ready = ""  # decoded text that was not returned yet
        self._held = ""  # may be the start of a stop string

    def append(self, tokens: Tokens[int]) -> AppendResult:
        """Append tokens up to the end of the sequence."""
        is_last = self.num_tokens + len(tokens) >= self.request.max_tokens
        if not self.stop_strings and not is_last and self.stop_token_ids.isdisjoint(tokens):
            self.num_tokens += len(tokens)
            self._undecoded += tokens
            return AppendResult(len(tokens), None)
        self._decode_pending()
        for count, token in enumerate(tokens, 1):
            self.num_tokens += 1
            text, finish_reason = self._append_one(token)
            if finish_reason is not None:
                self._held = ""
                self._ready += text
                return AppendResult(count, finish_reason)
            self._held = text
            self._ready += self._hold_back("")  # after every token, as if each came alone
        return AppendResult(len(tokens), None)

    def pop_text(self) -> str:
        """Return the text that became final since the last call."""
        self._decode_pending()
        text, self._ready = self._ready, ""
        self.text += text
        return text

    def finish(self) -> None:
        """Release the text that was held back: the sequence ends here."""
        self._decode_pending()
        self._ready += self._held + self._flush()
        self._held = ""

    def _decode_pending(self) -> None:
        if self._undecoded:
            self._ready += self._hold_back(self._decode(self._undecoded))
            self._undecoded.clear()

    def _append_one(self, token: int) -> tuple[str, FinishReason | None]:
        """Return the text held back so far with this token's, and the finish reason if the sequence ends here."""
        if token in self.stop_token_ids:
            return self._cut_at_stop(self._held + self._flush())[0], "stop"
        held, found = self._cut_at_stop(self._held + self._decode((token,)))
        if found:
            return held, "stop"
        if self.num_tokens >= self.request.max_tokens:
            held, found = self._cut_at_stop(held + self._flush())
            return held, "stop" if found else "length"
        return held, None

    def _cut_at_stop(self, text: str) -> tuple[str, bool]:
        """Return the text before the first stop string, and whether there is one; none counts before `min_tokens`."""
        if self.num_tokens < self.request.params.min_tokens:
            return text, False
        found = [(position, stop) for stop in self.stop_strings if (position := text.find(stop)) >= 0]
        if not found:
            return text, False
        position, self.matched_stop = min(found)
        return text[:position], True

    def _decode(self, tokens: Tokens[int]) -> str:
        return self.decoder.push(tokens) if self.decoder is not None else ""

    def _flush(self) -> str:
        return self.decoder.flush() if self.decoder is not None else ""

    def _hold_back(self, new: str) -> str:
        """Return the text that cannot be part of a stop string, and hold back the rest."""
        if not self.stop_strings:
            return new
        text = self._held + new
        held = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def decoder_for(request: Request, tokenizer: Tokenizer) -> StreamDecoder:
    """Return a decoder for a request's output tokens.

    It starts with the tail of the prompt, which decides about a leading space and may end within a character.
    """
    skip = request.params.skip_special_tokens
    return StreamDecoder(tokenizer, skip_special=skip, context=request.prompt[-PROMPT_TAIL:])


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
