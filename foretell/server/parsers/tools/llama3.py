"""Calls as Llama 3 writes them: the answer is {"name": ..., "parameters": {...}}, or several behind semicolons."""

from __future__ import annotations

from collections.abc import Generator

from foretell.server.parsers.base import ParseLoop

from .base import ToolCallJson, ToolCallParser

TAG = "<|python_tag|>"
BETWEEN = " \t\r\n;,"


class Llama3Parser(ToolCallParser):
    """An object is a call only if it names a tool and has parameters: answers may be JSON of their own."""

    def parse(self) -> ParseLoop:
        while (opening := (yield from self._opening())) is not None:
            call = ToolCallJson(self.emit, names=self.tool_names, needs_arguments=True)
            call.push("{")
            called = yield from self.parse_call(call, opening)
            if self.ended:
                return
            if not called:
                break
        if not self.ended:
            yield from self.emit_rest()

    def _opening(self) -> Generator[None, str, str | None]:
        """Pass over what may stand before a call and give it; None where words come, which are said."""
        held = ""
        while char := (yield):
            held += char
            found = held.lstrip(BETWEEN if self._after_call else None).removeprefix(TAG).lstrip()
            if found == "{":
                return held[:-1]
            if found and not TAG.startswith(found):
                break
        self.emit("content", held)
        return None
