"""What readers of tool calls share."""

from __future__ import annotations

from collections.abc import Generator

from foretell.server.parsers.base import Kind, OutputParser

from .call_json import CallJson, JsonScanState


class ToolCallParser(OutputParser):
    """`names` are the tools that can be called."""

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self.names = names
        self._after_call = False
        super().__init__()

    def read_call(self, call: CallJson, opening: str = "") -> Generator[None, str, bool]:
        """Read one call, and whether it was one; what turns out to be none is said as it stands."""
        while (state := call.push((yield))) is JsonScanState.READING:
            pass
        if state is JsonScanState.BAD:
            self.say("content", opening + call.raw)
        return state is JsonScanState.DONE

    def say(self, kind: Kind, text: str) -> None:
        """Words after a call begin with the first that is not blank."""
        if kind == "content" and self._after_call:
            text = text.lstrip()
        self._after_call = kind == "call" or (self._after_call and not (kind == "content" and text))
        super().say(kind, text)
