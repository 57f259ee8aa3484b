"""The Hermes and Qwen tool call format: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from foretell.server.parsers.base import ParseLoop

from .base import ToolCallJson, ToolCallParser

START_TAG, END_TAG = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """Parses content and tool calls in any order."""

    def parse(self) -> ParseLoop:
        held: str | None = ""
        while held is not None and (yield from self.parse_until(START_TAG, held=held)):
            is_call = yield from self.parse_call(ToolCallJson(self.emit), self.blank + START_TAG)
            if self.ended:
                return
            held = (yield from self.expect(END_TAG)) if is_call else ""
