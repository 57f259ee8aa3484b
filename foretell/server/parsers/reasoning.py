"""Thoughts apart from the answer, for models that think between <think> and </think>."""

from __future__ import annotations

from foretell.server.parsers.base import Kind, OutputParser, Program

OPENS, CLOSES = "<think>", "</think>"


class ReasoningParser(OutputParser):
    """`thinking`: whether the prompt ends inside a passage already, as some templates have it."""

    def __init__(self, thinking: bool) -> None:
        self.thinking = thinking
        self._thought = False
        super().__init__()

    def read(self) -> Program:
        held = ""
        while not self.thinking:
            char = yield
            held += char
            found = held.lstrip()
            if found == OPENS:
                break
            if not char or not OPENS.startswith(found):
                self.say("content", held)
                if char:
                    yield from self.rest()
                return
        if (yield from self.until(CLOSES, "reasoning")):
            while (char := (yield)) and char.isspace():
                pass
            if char:
                self.say("content", char)
                yield from self.rest()

    def say(self, kind: Kind, text: str) -> None:
        """Thoughts begin with their first word."""
        if kind == "reasoning" and not self._thought:
            text = text.lstrip()
            self._thought = bool(text)
        super().say(kind, text)


def starts_thinking(prompt: str) -> bool:
    """Whether a prompt leaves a passage open for the model to go on with."""
    return prompt.rstrip().endswith(OPENS)


def marks_thoughts(template: str | None) -> bool:
    """Whether a chat template knows of such passages."""
    return template is not None and CLOSES in template
