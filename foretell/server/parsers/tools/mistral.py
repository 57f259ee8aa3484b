"""The Mistral formats: [TOOL_CALLS][{"name": ..., "arguments": {...}}] and [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

from collections.abc import Generator

from foretell.server.parsers.base import ParseLoop

from .base import NAME, BracketTracker, ToolCallJson, ToolCallParser

TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ToolCallParser):
    """Parses tool calls. A list at the very start counts without the tag, a special token that may be skipped."""

    def parse(self) -> ParseLoop:
        held = yield from self._beginning()
        while held is not None and (yield from self.parse_until(TAG, held=held)):
            held = yield from self._calls()
        if held is not None and not self.ended:
            yield from self.emit_rest()

    def _beginning(self) -> Generator[None, str, str | None]:
        """Parse a list of calls at the start; return the text received if there is none, None at the end."""
        held = ""
        while char := (yield):
            held += char
            stripped = held.lstrip()
            if stripped[:1] == "[" and stripped[1:].lstrip() == "{":
                return (yield from self._list(held[:-1], bare=True))
            if stripped == TAG or not TAG.startswith(stripped) and (stripped[:1] != "[" or stripped[1:].strip()):
                return held
        self.emit("content", held)
        return None

    def _calls(self) -> Generator[None, str, str | None]:
        """Parse the calls after the tag; return text that belongs to the content again, None at the end."""
        held = opening = self.blank + TAG
        while char := (yield):
            held += char
            stripped = held[len(opening) :].lstrip()
            if stripped[:1] == "[" and stripped[1:].lstrip() == "{":
                return (yield from self._list(held[:-1]))
            if stripped.endswith("{") and stripped[:1] != "[":
                return (yield from self._named(held[:-1], stripped[:-1]))
        self.emit("content", held)
        return None

    def _list(self, opening: str, bare: bool = False) -> Generator[None, str, str | None]:
        while True:
            call = ToolCallJson(self.emit, names=self.tool_names if bare else None, needs_arguments=bare)
            call.push("{")
            is_call = yield from self.parse_call(call, opening)
            if self.ended:
                return None
            if not is_call:
                return ""
            while (char := (yield)) and char in " \t\r\n,":
                pass
            if char != "{":
                if not char:
                    return None
                return "" if char == "]" else char
            opening = ""

    def _named(self, opening: str, text: str) -> Generator[None, str, str | None]:
        name = text.removesuffix(ARGS).split(ID)[0].strip()
        if not NAME.fullmatch(name):
            return opening + "{"
        self.emit("call", name)
        self.emit("arguments", "{")
        brackets = BracketTracker()
        brackets.push("{")
        while brackets.depth:
            char = yield
            if not char:
                return None
            brackets.push(char)
            self.emit("arguments", char)
        return ""
