"""Calls as Hermes, Qwen and their kin write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from foretell.server.parsers.base import ParseLoop

from .base import ToolCallJson, ToolCallParser

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """Words and calls, in any order."""

    def parse(self) -> ParseLoop:
        while (yield from self.parse_until(OPENS)):
            called = yield from self.parse_call(ToolCallJson(self.emit), OPENS)
            if self.ended or (called and not (yield from self.expect(CLOSES))):
                return
