"""Harmony, the format of gpt-oss: channels with reasoning, content and calls, each a header, <|message|> and a body."""

from __future__ import annotations

import re
from collections.abc import Generator

from foretell.server.parsers.base import ParseLoop, PartKind, overlap

from .base import NAME, ToolCallParser

CHANNEL, START, MESSAGE, CONSTRAIN = "<|channel|>", "<|start|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)  # of a body
RECIPIENT = re.compile(rf"to=functions\.({NAME.pattern})")
CALLED = re.compile(r"\s*to=\S")  # a header that goes on after the prompt's <|start|>assistant


class HarmonyParser(ToolCallParser):
    """Parses all output of the model. The prompt ends in <|start|>assistant, so that a header comes first.

    Text without a header is content: a grammar leaves no room for one.
    """

    def parse(self) -> ParseLoop:
        header: str | None = yield from self._first_header()
        while header is not None:
            yield from self._body(header)
            if self.ended:
                return
            header = yield from self._header("")
        if not self.ended:
            yield from self.emit_rest()

    def _first_header(self) -> Generator[None, str, str | None]:
        held = ""
        while char := (yield):
            held += char
            start = held.lstrip()
            if start.startswith((CHANNEL, START)) or CALLED.match(held):
                return (yield from self._header(held))
            if start and not any(tag.startswith(start) for tag in (CHANNEL, START, "to=")):
                break
        self.emit("content", held)
        return None

    def _header(self, held: str) -> Generator[None, str, str | None]:
        """Return the text before <|message|>. A header that is cut off is dropped; other text is content."""
        while not held.endswith(MESSAGE):
            char = yield
            if not char:
                if not held.lstrip().startswith("<|"):
                    self.emit("content", held)
                return None
            held += char
        return held[: -len(MESSAGE)]

    def _body(self, header: str) -> ParseLoop:
        recipient = RECIPIENT.search(header)
        kind: PartKind = "reasoning" if header.rpartition(CHANNEL)[2].strip().startswith("analysis") else "content"
        if recipient is not None:
            self.emit("call", recipient[1])
            kind = "arguments"
        held = ""
        while char := (yield):
            held += char
            end = next((end for end in ENDS if held.endswith(end)), None)
            certain = len(held) - (len(end) if end else max(overlap(held, each) for each in ENDS))
            self.emit(kind, held[:certain])
            held = held[certain:]
            if end:
                return
        self.emit(kind, held)
