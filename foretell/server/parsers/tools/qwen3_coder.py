"""The format of Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>."""

from __future__ import annotations

from collections.abc import Generator

from foretell.server.parsers.base import ParseLoop

from .arguments import PlainArgumentsParser
from .base import NAME
from .hermes import END_TAG, START_TAG

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class Qwen3CoderParser(PlainArgumentsParser):
    """Parses content and calls in any order. A value has a line break before and after it that is not part of it."""

    def parse(self) -> ParseLoop:
        held: str | None = ""
        while held is not None and (tag := (yield from self.parse_until(START_TAG, FUNCTION, held=held))):
            name = yield from self._function_name(tag)
            held = ""
            if name is not None:
                self.start_call(name)
                held = yield from self._parse_arguments(name)
            if self.ended:
                return

    def _function_name(self, tag: str) -> Generator[None, str, str | None]:
        """Return the name after the opening tags; emit the text as content and return None if there is none.

        Models leave out the first tag now and then. Then it is a call only with the name of a tool.
        """
        opening, held = (START_TAG, "") if tag == START_TAG else ("", FUNCTION)
        while char := (yield):
            held += char
            start = held.lstrip()
            if start.startswith(FUNCTION) and char == ">":
                name = start[len(FUNCTION) : -1]
                if name in self.tool_names or (opening and NAME.fullmatch(name)):
                    return name
                break
            if not FUNCTION.startswith(start[: len(FUNCTION)]) or "\n" in start:
                break
        self.emit("content", self.blank + opening + held)
        return None

    def _parse_arguments(self, name: str) -> Generator[None, str, str | None]:
        """Parse a call up to its end tag; return the text received after it, None if the text ends first."""
        while found := (yield from self.read_until(PARAMETER, END_FUNCTION, END_TAG)):
            if found[1] != PARAMETER:
                self.emit("arguments", "}")
                return "" if found[1] == END_TAG else (yield from self.expect(END_TAG))
            key = yield from self.read_until(">")
            if key is None or not (yield from self.parse_value(name, key[0].strip(), END_PARAMETER, trim=True)):
                return None
        return None
