"""Arguments that a model writes as plain text, turned into JSON as they arrive."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any

from foretell.server.parsers.base import overlap

from .base import ToolCallParser

PYTHON = {"True": "true", "False": "false", "None": "null"}


class PlainArgumentsParser(ToolCallParser):
    """A parser of calls whose values are text between tags; the tool's schema says which of them are strings."""

    _num_arguments = 0  # of the current call

    def start_call(self, name: str) -> None:
        """Emit a call and the start of its arguments."""
        self.emit("call", name)
        self.emit("arguments", "{")
        self._num_arguments = 0

    def parse_value(self, name: str, key: str, end: str, trim: bool = False) -> Generator[None, str, bool]:
        """Emit an argument up to the tag `end`; return False if the text ends first.

        `trim`: one line break before the value and one after it are not part of it.
        """
        self.emit("arguments", ", " if self._num_arguments else "")
        self._num_arguments += 1
        self.emit("arguments", f"{json.dumps(key, ensure_ascii=False)}: ")
        if is_text(self._schema(name, key)):
            return (yield from self._parse_text(end, trim))
        found = yield from self.read_until(end)
        if found is not None:
            self.emit("arguments", as_json(found[0].removeprefix("\n").removesuffix("\n") if trim else found[0]))
        return found is not None

    def _parse_text(self, end: str, trim: bool) -> Generator[None, str, bool]:
        self.emit("arguments", '"')
        ends = ("\n" + end, end) if trim else (end,)  # the longest first
        held, is_first = "", True
        while char := (yield):
            if not (is_first and trim and char == "\n"):
                held += char
            is_first = False
            found = next((each for each in ends if held.endswith(each)), None)
            certain = len(held) - (len(found) if found else max(overlap(held, each) for each in ends))
            self.emit("arguments", escaped(held[:certain]))
            held = held[certain:]
            if found:
                self.emit("arguments", '"')
                return True
        self.emit("arguments", escaped(held))
        return False

    def read_until(self, *tags: str) -> Generator[None, str, tuple[str, str] | None]:
        """Return the text before the first of the tags, and that tag; None if the text ends first."""
        held: list[str] = []
        tail, longest = "", max(map(len, tags))
        while char := (yield):
            held.append(char)
            tail = (tail + char)[-longest:]
            for tag in tags:
                if tail.endswith(tag):
                    return "".join(held)[: -len(tag)], tag
        return None

    def _schema(self, name: str, key: str) -> Any:
        properties = self.parameters.get(name, {}).get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None


def is_text(schema: Any) -> bool:
    """Return whether an argument is a string for certain, so that it can be emitted as it arrives."""
    if not isinstance(schema, Mapping):
        return False
    options = schema.get("enum")
    if isinstance(options, list) and "type" not in schema:
        return all(isinstance(option, str) for option in options)
    return schema.get("type") == "string"


def as_json(text: str) -> str:
    """Return the JSON of a value that may be a string: text that is no JSON is one."""
    text = PYTHON.get(text.strip(), text)
    return text.strip() if is_json(text) else json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Return whether a text is JSON; NaN and the infinities are not."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def escaped(text: str) -> str:
    """Return text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
