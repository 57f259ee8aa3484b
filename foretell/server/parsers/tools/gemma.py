"""The formats of Gemma: <|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,...}<tool_call|>, and FunctionGemma's other tags."""

from __future__ import annotations

from collections.abc import Generator

from foretell.server.parsers.base import ParseLoop, overlap

from .arguments import escaped, is_json
from .base import ToolCallParser
from .mistral import NAME

CALL = "call:"
PUNCTUATION = "{}[]:,"
SPACED = {":": ": ", ",": ", "}  # as json.dumps writes them


class Gemma4Parser(ToolCallParser):
    """Parses content and calls in any order. Keys have no quotes, and strings have tags for quotes."""

    start_tag, end_tag, quote = "<|tool_call>", "<tool_call|>", '<|"|>'

    def parse(self) -> ParseLoop:
        while (yield from self.parse_until(self.start_tag)):
            name = yield from self._name()
            if name is not None:
                self.emit("call", name)
                if not (yield from self._arguments()) or not (yield from self.expect(self.end_tag)):
                    return
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
        self.emit("content", self.start_tag + held)
        return None

    def _arguments(self) -> Generator[None, str, bool]:
        """Emit the arguments as JSON after the first bracket; return False if the text ends first."""
        self.emit("arguments", "{")
        depth, held = 1, ""  # a key or a value without quotes, or the start of a quote
        while depth:
            char = yield
            if not char:
                return False
            held += char
            if held.lstrip() in (self.quote, '"'):
                if not (yield from self._string() if char != '"' or self.quote in held else self._json_string()):
                    return False
                held = ""
            elif char in PUNCTUATION:
                depth += (char in "{[") - (char in "}]")
                self.emit("arguments", _bare(held[:-1].strip(), is_key=char == ":") + SPACED.get(char, char))
                held = ""
        return True

    def _string(self) -> Generator[None, str, bool]:
        """Emit a string after its first quote."""
        self.emit("arguments", '"')
        held = ""
        while char := (yield):
            held += char
            ends = held.endswith(self.quote)
            certain = len(held) - (len(self.quote) if ends else overlap(held, self.quote))
            self.emit("arguments", escaped(held[:certain]) + ('"' if ends else ""))
            held = held[certain:]
            if ends:
                return True
        self.emit("arguments", escaped(held))
        return False

    def _json_string(self) -> Generator[None, str, bool]:
        """Emit a string in JSON's own quotes after the first of them."""
        self.emit("arguments", '"')
        is_escaped = False
        while char := (yield):
            self.emit("arguments", char if char in '"\\' else escaped(char))
            if char == '"' and not is_escaped:
                return True
            is_escaped = char == "\\" and not is_escaped
        return False


def _bare(text: str, is_key: bool) -> str:
    """Return the JSON of text without quotes: a key, a number, true, false or null; anything else is a string."""
    return text if not text or (is_json(text) and not is_key) else f'"{escaped(text)}"'


class FunctionGemmaParser(Gemma4Parser):
    """Parses the calls of FunctionGemma."""

    start_tag, end_tag, quote = "<start_function_call>", "<end_function_call>", "<escape>"
