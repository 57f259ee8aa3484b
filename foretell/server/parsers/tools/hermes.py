"""Calls as Hermes, Qwen and their kin write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from foretell.server.parsers.base import Program

from .base import CallJson, ToolCallParser

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """Words and calls, in any order."""

    def read(self) -> Program:
        while (yield from self.until(OPENS)):
            called = yield from self.read_call(CallJson(self.say), OPENS)
            if self.ended or (called and not (yield from self.expect(CLOSES))):
                return
