"""Turns the tokens of one text into its words, and knows where it ends."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from foretell.tokenizer import StreamDecoder, Tokenizer
from foretell.types import FinishReason, Request

CONTEXT = 8  # tokens of the prompt that can bear on how the first new one reads


@dataclass(frozen=True)
class Written:
    """What became of a step's tokens: how many entered the text, the words that are certain now, the end if it came."""

    count: int
    text: str
    finish: FinishReason | None


class Writer:
    """Cuts at end tokens, stop strings and the limit; holds back what may be the beginning of a stop string."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.decoder = None if tokenizer is None else decoder_for(request, tokenizer)
        self.stops = request.params.stop
        self.ends = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            self.ends |= request.end_ids
        self.count = 0
        self.text = ""
        self._held = ""

    def write(self, tokens: Tokens[int]) -> Written:
        """Take tokens up to the end of the text."""
        if not self.stops and self.ends.isdisjoint(tokens) and self.count + len(tokens) < self.request.max_tokens:
            self.count += len(tokens)
            return Written(len(tokens), self._certain(self._decode(tokens)), None)
        given = ""
        for taken, token in enumerate(tokens, 1):
            self.count += 1
            text, finish = self._write_one(token)
            if finish is not None:
                return Written(taken, given + self._emit(text), finish)
            self._held = text
            given += self._certain("")  # after every token, as if each came alone
        return Written(len(tokens), given, None)

    def _write_one(self, token: int) -> tuple[str, FinishReason | None]:
        """The text held back so far with this token's, and whether it ends here."""
        if token in self.ends:
            return self._cut(self._held + self._flush())[0], "stop"
        held, found = self._cut(self._held + self._decode((token,)))
        if found:
            return held, "stop"
        if self.count >= self.request.max_tokens:
            held, found = self._cut(held + self._flush())
            return held, "stop" if found else "length"
        return held, None

    def _cut(self, text: str) -> tuple[str, bool]:
        """The text up to the first stop string, and whether there is one that counts."""
        if self.count < self.request.params.min_tokens:
            return text, False
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return (text[: min(found)], True) if found else (text, False)

    def close(self) -> str:
        """The text ends here: give out what was held back."""
        held, self._held = self._held + self._flush(), ""
        return self._emit(held)

    def _decode(self, tokens: Tokens[int]) -> str:
        return self.decoder.push(tokens) if self.decoder is not None else ""

    def _flush(self) -> str:
        return self.decoder.flush() if self.decoder is not None else ""

    def _certain(self, new: str) -> str:
        """Give out what no stop string can begin with; hold the rest."""
        if not self.stops:
            return self._emit(new)
        text = self._held + new
        hold = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - hold :]
        return self._emit(text[: len(text) - hold])

    def _emit(self, text: str) -> str:
        self.text += text
        return text


def decoder_for(request: Request, tokenizer: Tokenizer) -> StreamDecoder:
    """What reads a request's tokens. The prompt's tail decides how the first one reads: a space in front of it, half a
    character before it."""
    skip = request.params.skip_special_tokens
    return StreamDecoder(tokenizer, skip_special=skip, context=request.prompt[-CONTEXT:])


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
