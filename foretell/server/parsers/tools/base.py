"""The base of tool call parsers, and an incremental parser of a call written as a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Generator, Mapping
from enum import Enum
from typing import Any

from foretell.server.json_schemas import TOOL_NAME_PATTERN
from foretell.server.parsers.base import OutputParser, PartKind

NAME = re.compile(TOOL_NAME_PATTERN.strip("^$"))
ARGUMENTS = ("arguments", "parameters")
Emit = Callable[[PartKind, str], None]


class JsonScanState(Enum):
    """The state of parsing one call."""

    PARSING = 0
    DONE = 1
    INVALID = 2  # not a call; `raw` has the text received


class BracketTracker:
    """Tracks the bracket depth of JSON outside strings."""

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
    """Parses {"name": ..., "arguments": {...}}: emits the name once it is known, then the arguments as they arrive."""

    def __init__(self, emit: Emit, *, names: Container[str] | None = None, needs_arguments: bool = False) -> None:
        """`names`: the tools; with it, an object with another name is not a call."""
        self._emit, self._names, self._needs_arguments = emit, names, needs_arguments
        self.raw = ""
        self.named = False  # whether the name was emitted; from then on it is a call
        self._brackets = BracketTracker()
        self._name: str | None = None
        self._key: str | None = None  # key of the current value
        self._text = ""  # current key or value
        self._arguments = ""  # not emitted yet, because the name is not known
        self._had_arguments = False

    def push(self, char: str) -> JsonScanState:
        """Parse one character, or "" at the end of the text."""
        self.raw += char
        brackets = self._brackets
        if not char:
            return self._fail()
        if brackets.depth == 0:
            return self._open(char)
        brackets.push(char)
        if brackets.depth == 0:
            return self._close()
        if self._key is None:
            return self._parse_key(char)
        if char == "," and brackets.depth == 1 and not brackets.quoted:
            return self._end_value()
        self._text += char
        if self._key in ARGUMENTS and not self._had_arguments:
            self._parse_arguments(char)
        return JsonScanState.PARSING

    def _open(self, char: str) -> JsonScanState:
        if char == "{":
            self._brackets.push(char)
        elif not char.isspace():
            return JsonScanState.INVALID
        return JsonScanState.PARSING

    def _parse_key(self, char: str) -> JsonScanState:
        if char == ":" and not self._brackets.quoted:
            key = json_value(self._text)
            if not isinstance(key, str):
                return self._fail()
            self._key, self._text = key, ""
        else:
            self._text += char
        return JsonScanState.PARSING

    def _parse_arguments(self, char: str) -> None:
        """Emit an object as it arrives; any other value is held until it is complete."""
        if self._text.lstrip()[:1] != "{":
            return
        self._arguments += char
        if self._brackets.depth == 1 and not self._brackets.quoted:
            self._had_arguments = True
        self._flush()

    def _end_value(self) -> JsonScanState:
        value = json_value(self._text)
        if self._key == "name":
            if not isinstance(value, str) or not value or (self._names is not None and value not in self._names):
                return self._fail()
            self._name = value
            self._flush()
        elif self._key in ARGUMENTS and not self._had_arguments:
            self._arguments = (
                value if isinstance(value, str) else self._text.strip()
            )  # some models write JSON in a string
            self._had_arguments = True
            self._flush()
        self._key, self._text = None, ""
        return JsonScanState.PARSING

    def _flush(self) -> None:
        """Emit once name and arguments are known: an object with a name alone is no call."""
        if self._name is None or not self._arguments:
            return
        if not self.named:
            self._emit("call", self._name)
            self.named = True
        self._emit("arguments", self._arguments)
        self._arguments = ""

    def _close(self) -> JsonScanState:
        if self._key is not None and self._end_value() is JsonScanState.INVALID:
            return JsonScanState.INVALID
        if self._name is None or (self._needs_arguments and not self._had_arguments):
            return self._fail()
        if not self.named:
            self._arguments = "{}"
            self._flush()
        return JsonScanState.DONE

    def _fail(self) -> JsonScanState:
        return JsonScanState.DONE if self.named else JsonScanState.INVALID


def json_value(text: str) -> Any:
    """Return the value of a JSON text, or None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class ToolCallParser(OutputParser):
    """Base of the tool call parsers; `tool_names` are the tools of the request."""

    def __init__(
        self, names: frozenset[str] = frozenset(), parameters: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """`parameters`: the JSON schemas of the arguments by tool, for formats that do not quote strings."""
        self.tool_names = names
        self.parameters = parameters or {}
        self._after_call = False
        super().__init__()

    def parse_call(self, call: ToolCallJson, opening: str = "") -> Generator[None, str, bool]:
        """Parse one call and return whether it was one; emit the text as content if not."""
        while (state := call.push((yield))) is JsonScanState.PARSING:
            pass
        if state is JsonScanState.INVALID:
            self.emit("content", opening + call.raw)
        return state is JsonScanState.DONE

    def emit(self, kind: PartKind, text: str) -> None:
        """Emit without whitespace between a call and the content after it."""
        if kind == "content" and self._after_call:
            text = text.lstrip()
        self._after_call = kind == "call" or (self._after_call and not (kind == "content" and text))
        super().emit(kind, text)
