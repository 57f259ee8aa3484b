"""Turns the tokens of one text into its words, and knows where it ends."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple

from foretell.tokenizer import StreamDecoder, Tokenizer
from foretell.types import FinishReason, Request

CONTEXT = 8  # tokens of the prompt that can bear on how the first new one reads


class Taken(NamedTuple):
    """What became of a step's tokens: how many entered the text, and the end if it came."""

    entered: int
    finish: FinishReason | None


class Detokenizer:
    """Cuts at end tokens, stop strings and the limit; holds back what may be the beginning of a stop string.

    Tokens are taken first, and what they say is told when somebody asks: while a device waits for the next step, words
    are looked for only where the end may hang on them.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.decoder = None if tokenizer is None else decoder_for(request, tokenizer)
        self.stops = request.params.stop
        self.ends = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            self.ends |= request.end_ids
        self.count = 0
        self.text = ""  # all that was told
        self._unread: list[int] = []  # tokens whose words nobody has looked for yet
        self._ready = ""  # words that are certain, and not told yet
        self._held = ""

    def take(self, tokens: Tokens[int]) -> Taken:
        """Let tokens in up to the end of the text."""
        if not self.stops and self.ends.isdisjoint(tokens) and self.count + len(tokens) < self.request.max_tokens:
            self.count += len(tokens)
            self._unread += tokens
            return Taken(len(tokens), None)
        self._read()
        for taken, token in enumerate(tokens, 1):
            self.count += 1
            text, finish = self._take_one(token)
            if finish is not None:
                self._held, self._ready = "", self._ready + text
                return Taken(taken, finish)
            self._held = text
            self._ready += self._certain("")  # after every token, as if each came alone
        return Taken(len(tokens), None)

    def tell(self) -> str:
        """The words that have become certain since they were last told."""
        self._read()
        told, self._ready = self._ready, ""
        self.text += told
        return told

    def _read(self) -> None:
        if self._unread:
            self._ready += self._certain(self._decode(self._unread))
            self._unread.clear()

    def _take_one(self, token: int) -> tuple[str, FinishReason | None]:
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

    def close(self) -> None:
        """The text ends here: what was held back is certain."""
        self._read()
        held, self._held = self._held + self._flush(), ""
        self._ready += held

    def _decode(self, tokens: Tokens[int]) -> str:
        return self.decoder.push(tokens) if self.decoder is not None else ""

    def _flush(self) -> str:
        return self.decoder.flush() if self.decoder is not None else ""

    def _certain(self, new: str) -> str:
        """Give out what no stop string can begin with; hold the rest."""
        if not self.stops:
            return new
        text = self._held + new
        hold = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


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
