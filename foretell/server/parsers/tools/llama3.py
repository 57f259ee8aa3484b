"""The Llama 3 tool call format: the output is {"name": ..., "parameters": {...}}, or several with semicolons."""

from __future__ import annotations

from collections.abc import Generator

from foretell.server.parsers.base import ParseLoop

from .base import ToolCallJson, ToolCallParser

TAG = "<|python_tag|>"
SEPARATORS = " \t\r\n;,"


class Llama3Parser(ToolCallParser):
    """Parses tool calls. An object counts as one only with a known name and parameters: content may be JSON too."""

    def parse(self) -> ParseLoop:
        while (opening := (yield from self._opening())) is not None:
            call = ToolCallJson(self.emit, names=self.tool_names, needs_arguments=True)
            call.push("{")
            is_call = yield from self.parse_call(call, opening)
            if self.ended:
                return
            if not is_call:
                break
        if not self.ended:
            yield from self.emit_rest()

    def _opening(self) -> Generator[None, str, str | None]:
        """Skip and return the text before a call; emit it and return None if no call follows."""
        held = ""
        while char := (yield):
            held += char
            stripped = held.lstrip(SEPARATORS if self._after_call else None).removeprefix(TAG).lstrip()
            if stripped == "{":
                return held[:-1]
            if stripped and not TAG.startswith(stripped):
                break
        self.emit("content", held)
        return None
