"""What readers of tool calls share."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Generator
from enum import Enum
from typing import Any

from foretell.server.parsers.base import OutputParser, PartKind

ARGUMENTS = ("arguments", "parameters")
Say = Callable[[PartKind, str], None]


class JsonScanState(Enum):
    """Where the reading of a value stands."""

    READING = 0
    DONE = 1
    BAD = 2  # this is no call; `raw` has what was read


class BracketTracker:
    """Follows brackets and strings, and knows where a value ends."""

    def __init__(self) -> None:
        self.depth = 0
        self.quoted = False
        self._escaped = False

    def push(self, char: str) -> None:
        if self.quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.quoted = False
        elif char == '"':
            self.quoted = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class ToolCallJson:
    """{"name": ..., "arguments": {...}}: says the name once it is known, then the arguments as they come."""

    def __init__(self, say: Say, *, names: Container[str] | None = None, needs_arguments: bool = False) -> None:
        """`names`: those that can be called, where others mean that this is no call."""
        self._say, self._names, self._needs_arguments = say, names, needs_arguments
        self.raw = ""
        self.named = False  # whether the call was said: from then on it cannot be taken back
        self._balance = BracketTracker()
        self._name: str | None = None
        self._key: str | None = None  # of the value being read
        self._text = ""  # of the key or value being read
        self._arguments = ""  # not said yet, because the name is not known
        self._had_arguments = False

    def push(self, char: str) -> JsonScanState:
        """Take one character, or "" at the end of the text."""
        self.raw += char
        balance = self._balance
        if not char:
            return self._bad()
        if balance.depth == 0:
            return self._open(char)
        balance.push(char)
        if balance.depth == 0:
            return self._close()
        if self._key is None:
            return self._read_key(char)
        if char == "," and balance.depth == 1 and not balance.quoted:
            return self._end_value()
        self._text += char
        if self._key in ARGUMENTS and not self._had_arguments:
            self._read_arguments(char)
        return JsonScanState.READING

    def _open(self, char: str) -> JsonScanState:
        if char == "{":
            self._balance.push(char)
        elif not char.isspace():
            return JsonScanState.BAD
        return JsonScanState.READING

    def _read_key(self, char: str) -> JsonScanState:
        if char == ":" and not self._balance.quoted:
            key = _value(self._text)
            if not isinstance(key, str):
                return self._bad()
            self._key, self._text = key, ""
        else:
            self._text += char
        return JsonScanState.READING

    def _read_arguments(self, char: str) -> None:
        """Pass on an object as it comes; anything else waits until it is whole."""
        if self._text.lstrip()[:1] != "{":
            return
        self._arguments += char
        if self._balance.depth == 1 and not self._balance.quoted:
            self._had_arguments = True
        self._flush()

    def _end_value(self) -> JsonScanState:
        value = _value(self._text)
        if self._key == "name":
            if not isinstance(value, str) or not value or (self._names is not None and value not in self._names):
                return self._bad()
            self._name = value
            self._flush()
        elif self._key in ARGUMENTS and not self._had_arguments:
            self._arguments = value if isinstance(value, str) else self._text.strip()  # some write JSON in a string
            self._had_arguments = True
            self._flush()
        self._key, self._text = None, ""
        return JsonScanState.READING

    def _flush(self) -> None:
        """Say what can be said: nothing before both are there, so that an object with a name alone stays an object."""
        if self._name is None or not self._arguments:
            return
        if not self.named:
            self._say("call", self._name)
            self.named = True
        self._say("arguments", self._arguments)
        self._arguments = ""

    def _close(self) -> JsonScanState:
        if self._key is not None and self._end_value() is JsonScanState.BAD:
            return JsonScanState.BAD
        if self._name is None or (self._needs_arguments and not self._had_arguments):
            return self._bad()
        if not self.named:
            self._arguments = "{}"
            self._flush()
        return JsonScanState.DONE

    def _bad(self) -> JsonScanState:
        return JsonScanState.DONE if self.named else JsonScanState.BAD


def _value(text: str) -> Any:
    """What a piece of JSON says, or None if it says nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class ToolCallParser(OutputParser):
    """`names` are the tools that can be called."""

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self.tool_names = names
        self._after_call = False
        super().__init__()

    def parse_call(self, call: ToolCallJson, opening: str = "") -> Generator[None, str, bool]:
        """Read one call, and whether it was one; what turns out to be none is said as it stands."""
        while (state := call.push((yield))) is JsonScanState.READING:
            pass
        if state is JsonScanState.BAD:
            self.emit("content", opening + call.raw)
        return state is JsonScanState.DONE

    def emit(self, kind: PartKind, text: str) -> None:
        """Words after a call begin with the first that is not blank."""
        if kind == "content" and self._after_call:
            text = text.lstrip()
        self._after_call = kind == "call" or (self._after_call and not (kind == "content" and text))
        super().emit(kind, text)
