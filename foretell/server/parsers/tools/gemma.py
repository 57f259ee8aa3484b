"""The formats of Gemma: <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,...}<tool_call|>, and FunctionGemma's other tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

from foretell.server.parsers.base import ParseLoop, overlap

from .arguments import escaped, is_json
from .base import NAME, ToolCallParser

CALL = "call:"
CLOSERS = {"{": "}", "[": "]"}
PUNCTUATION = "{}[]:,"
ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')  # a complete escape of JSON
ESCAPE_START = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")  # what may become one


class Gemma4Parser(ToolCallParser):
    """Parses content and calls in any order. Keys have no quotes, and strings have tags for quotes."""

    start_tag, end_tag, quote = "<|tool_call>", "<tool_call|>", '<|"|>'

    def parse(self) -> ParseLoop:
        held: str | None = ""
        while held is not None and (yield from self.parse_until(self.start_tag, held=held)):
            name = yield from self._name()
            held = ""
            if name is not None:
                self.emit("call", name)
                held = yield from self._arguments()
            if self.ended:
                return

    def _name(self) -> Generator[None, str, str | None]:
        """Return the name before the arguments; emit the text as content and return None if there is none."""
        held = ""
        while char := (yield):
            held += char
            start = held.lstrip()
            name = start[len(CALL) :]
            if char == "{" and start.startswith(CALL) and NAME.fullmatch(name[:-1]):
                return name[:-1]
            if not CALL.startswith(start[: len(CALL)]) or (name and not NAME.fullmatch(name)):
                break
        self.emit("content", self.blank + self.start_tag + held)
        return None

    def _arguments(self) -> Generator[None, str, str | None]:
        """Emit the arguments as JSON after the first bracket, and skip the end tag.

        Return the text received after it, None if the text ends first. The arguments are JSON whatever comes.
        """
        writer = JsonWriter(lambda text: self.emit("arguments", text))
        held = ""  # a key or a value without quotes, or the start of a quote
        while writer.is_open:
            char = yield
            if not char:
                return None
            held += char
            if held.endswith(self.end_tag):
                writer.close_all(held.removesuffix(self.end_tag).strip())
                return ""
            if held.endswith(self.quote) or held.lstrip() == '"':
                write = writer.string()
                own = self._string(write) if held.endswith(self.quote) else self._json_string(write)
                if not (yield from own):
                    return None
                held = ""
            elif char in PUNCTUATION and writer.punctuation(char, held[:-1].strip()):
                held = ""
        return (yield from self.expect(self.end_tag))

    def _string(self, write: Callable[[str], None]) -> Generator[None, str, bool]:
        """Write a string after its first quote; return False if the text ends first."""
        write('"')
        held = ""
        while char := (yield):
            held += char
            ends = held.endswith(self.quote)
            certain = len(held) - (len(self.quote) if ends else overlap(held, self.quote))
            write(escaped(held[:certain]) + ('"' if ends else ""))
            held = held[certain:]
            if ends:
                return True
        write(escaped(held))
        return False

    def _json_string(self, write: Callable[[str], None]) -> Generator[None, str, bool]:
        """Write a string in JSON's own quotes after the first of them; return False if the text ends first."""
        write('"')
        held = ""  # the start of an escape
        while char := (yield):
            held += char
            if len(held) > 1 and not ESCAPE.fullmatch(held) and not ESCAPE_START.fullmatch(held):
                write(escaped(held[:-1]))
                held = char
            if held == '"':
                write(held)
                return True
            if not ESCAPE_START.fullmatch(held):
                write(held if len(held) > 1 else escaped(held))
                held = ""
        write(escaped(held))
        return False


@dataclass
class _Container:
    """An open object or list. `expects`: what comes next, a key, a colon, a value or, after one, a comma."""

    bracket: str
    expects: str
    is_empty: bool = True
    repeats: int = 0  # brackets that repeat its own


class JsonWriter:
    """Writes an object as JSON: a comma only between two members, a value for each key, a closer for each bracket."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._open = [_Container("{", "key")]
        write("{")

    @property
    def is_open(self) -> bool:
        """Return whether the outermost object is not closed."""
        return bool(self._open)

    def string(self) -> Callable[[str], None]:
        """Begin a string; return the function that writes it, which writes nothing where none may be."""
        top = self._open[-1]
        if top.expects == "key":
            self._separate()
            top.expects = "colon"
            return self._write
        if top.expects != "value":
            return lambda text: None
        self._begin_value()
        top.expects = "comma"
        return self._write

    def punctuation(self, char: str, text: str) -> bool:
        """Write the text without quotes before a punctuation mark, and the mark; return False if it is plain text."""
        top = self._open[-1]
        if char == ":" and top.expects == "value" and text:
            return False  # as in 12:30
        if top.bracket == "{" and top.expects == "comma" and char == ":":
            top.expects = "key"  # the comma before it is missing
        if top.expects == "key" and text:
            self._separate()
            self._write(f'"{escaped(text)}"')
            top.expects = "colon"
            text = ""
        match char:
            case ":":
                top.expects = "value" if top.expects == "colon" else top.expects
            case ",":
                self._end_value(text)
                top.expects = "key" if top.bracket == "{" else "value"
            case "{" | "[":
                self._begin(char)
            case _:
                self._close(char, text)
        return True

    def close_all(self, text: str) -> None:
        """Write the text without quotes that came last, and close everything."""
        while self._open:
            self._close(CLOSERS[self._open[-1].bracket], text)
            text = ""

    def _begin(self, bracket: str) -> None:
        """Open an object or a list where a value may be. In {{a:1}} the inner members are those of the outer object."""
        top = self._open[-1]
        if bracket == top.bracket == "{" and top.expects == "key":
            top.repeats += 1
        elif top.expects in ("value", "colon"):
            top.expects = "value"
            self._begin_value()
            top.expects = "comma"
            self._write(bracket)
            self._open.append(_Container(bracket, "key" if bracket == "{" else "value"))

    def _close(self, closer: str, text: str) -> None:
        """Close the innermost container with this closer, and those inside it; ignore a closer of none."""
        self._end_value(text)
        if not any(CLOSERS[each.bracket] == closer for each in self._open):
            return
        while self._open:
            self._end_value("")
            top = self._open[-1]
            if CLOSERS[top.bracket] == closer and top.repeats:
                top.repeats -= 1
                return
            self._open.pop()
            self._write(CLOSERS[top.bracket])
            if CLOSERS[top.bracket] == closer:
                return

    def _end_value(self, text: str) -> None:
        """Write a value without quotes; a key without one gets null."""
        top = self._open[-1]
        if top.expects == "colon":
            top.expects = "value"
        if top.expects == "value" and (text or top.bracket == "{"):
            self._begin_value()
            self._write(text if is_json(text) else f'"{escaped(text)}"' if text else "null")
            top.expects = "comma"

    def _begin_value(self) -> None:
        """Write what comes before a value: a colon in an object, a comma in a list."""
        if self._open[-1].bracket == "{":
            self._write(": ")
        else:
            self._separate()

    def _separate(self) -> None:
        top = self._open[-1]
        self._write("" if top.is_empty else ", ")
        top.is_empty = False


class FunctionGemmaParser(Gemma4Parser):
    """Parses the calls of FunctionGemma."""

    start_tag, end_tag, quote = "<start_function_call>", "<end_function_call>", "<escape>"
