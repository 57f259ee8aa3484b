"""The format of GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>."""

from __future__ import annotations

from collections.abc import Generator

from foretell.server.parsers.base import ParseLoop

from .arguments import PlainArgumentsParser
from .base import NAME
from .hermes import END_TAG, START_TAG

KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
MAX_NAME = 160  # characters before the name of a call must have ended


class GlmParser(PlainArgumentsParser):
    """Parses content and calls in any order. Line breaks between the tags have no meaning."""

    def parse(self) -> ParseLoop:
        while (yield from self.parse_until(START_TAG)):
            found = yield from self._name()
            if found is not None:
                self.start_call(found[0])
                if not (yield from self._parse_arguments(*found)):
                    return
            if self.ended:
                return

    def _name(self) -> Generator[None, str, tuple[str, str] | None]:
        """Return the name and the tag after it; emit the text as content and return None if there is no call."""
        held = ""
        while char := (yield):
            held += char
            tag = next((tag for tag in (KEY, END_TAG) if held.endswith(tag)), None)
            if tag is not None:
                name = held[: -len(tag)].strip()
                if NAME.fullmatch(name):
                    return name, tag
                break
            name = held.partition("<")[0].strip()
            if (name and not NAME.fullmatch(name)) or len(held.strip()) > MAX_NAME:
                break
        self.emit("content", self.blank + START_TAG + held)
        return None

    def _parse_arguments(self, name: str, tag: str) -> Generator[None, str, bool]:
        """Parse a call from its first tag up to its end; return False if the text ends first."""
        while tag == KEY:
            key = yield from self.read_until(END_KEY)
            if key is None or (yield from self.read_until(VALUE)) is None:
                return False
            if not (yield from self.parse_value(name, key[0].strip(), END_VALUE)):
                return False
            found = yield from self.read_until(KEY, END_TAG)
            if found is None:
                return False
            tag = found[1]
        self.emit("arguments", "}")
        return True
