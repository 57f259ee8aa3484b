"""Arguments that a model writes as plain text, turned into JSON as they arrive."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping

from foretell.server.parsers.base import overlap

from .base import ToolCallParser, json_value
from .schemas import Types, is_text, permits, permitted_types

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
        types = self._types(name, key)
        if is_text(types):
            return (yield from self._parse_text(end, trim))
        found = yield from self.read_until(end)
        if found is not None:
            text = found[0].removeprefix("\n").removesuffix("\n") if trim else found[0]
            self.emit("arguments", as_json(text, types))
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

    def _types(self, name: str, key: str) -> Types:
        schema = self.parameters.get(name, {})
        properties = schema.get("properties")
        return permitted_types(properties.get(key), schema) if isinstance(properties, Mapping) else None


def as_json(text: str, types: Types = None) -> str:
    """Return the JSON of a value of these types: text that is no JSON is a string.

    So is JSON where a string is permitted and the type of the JSON is not: the content of a file may be a number.
    """
    given = PYTHON.get(text.strip(), text)
    if not is_json(given):
        return json.dumps(text, ensure_ascii=False)
    may_be_text = types is not None and "string" in types
    value = json_value(given)
    if may_be_text and (isinstance(value, str) or not permits(types, value)):
        return json.dumps(text, ensure_ascii=False)
    return given.strip()


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
