"""Calls as Mistral writes them: [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re
from collections.abc import Generator

from foretell.server.parsers.base import ParseLoop

from .base import BracketTracker, ToolCallJson, ToolCallParser

MARK, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class MistralParser(ToolCallParser):
    """A list at the very beginning counts without its mark too: a special token, it may have been left out."""

    def parse(self) -> ParseLoop:
        held = yield from self._beginning()
        while held is not None and (yield from self.parse_until(MARK, held=held)):
            held = yield from self._calls()
        if held is not None and not self.ended:
            yield from self.emit_rest()

    def _beginning(self) -> Generator[None, str, str | None]:
        """Pass over a list of calls that the text begins with, or give what it begins with instead."""
        held = ""
        while char := (yield):
            held += char
            found = held.lstrip()
            if found[:1] == "[" and found[1:].lstrip() == "{":
                return (yield from self._list(held[:-1], bare=True))
            if found == MARK or not MARK.startswith(found) and (found[:1] != "[" or found[1:].strip()):
                return held
        self.emit("content", held)
        return None

    def _calls(self) -> Generator[None, str, str | None]:
        """What stands behind the mark; gives what belongs to the words again, None at the end."""
        held = MARK
        while char := (yield):
            held += char
            found = held[len(MARK) :].lstrip()
            if found[:1] == "[" and found[1:].lstrip() == "{":
                return (yield from self._list(held[:-1]))
            if found.endswith("{") and found[:1] != "[":
                return (yield from self._named(held[:-1], found[:-1]))
        self.emit("content", held)
        return None

    def _list(self, opening: str, bare: bool = False) -> Generator[None, str, str | None]:
        while True:
            call = ToolCallJson(self.emit, names=self.tool_names if bare else None, needs_arguments=bare)
            call.push("{")
            called = yield from self.parse_call(call, opening)
            if self.ended:
                return None
            if not called:
                return ""
            while (char := (yield)) and char in " \t\r\n,":
                pass
            if char != "{":
                return None if not char else "" if char == "]" else char
            opening = ""

    def _named(self, opening: str, text: str) -> Generator[None, str, str | None]:
        name = text.removesuffix(ARGS).split(ID)[0].strip()
        if not NAME.fullmatch(name):
            return opening + "{"
        self.emit("call", name)
        self.emit("arguments", "{")
        balance = BracketTracker()
        balance.push("{")
        while balance.depth:
            char = yield
            if not char:
                return None
            balance.push(char)
            self.emit("arguments", char)
        return ""
