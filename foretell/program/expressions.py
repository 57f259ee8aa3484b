"""Expressions that a program appends to its state: text, gen, select, and turns of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from foretell.errors import RequestError

from .settings import GenSettings


@dataclass(frozen=True)
class TextPart:
    """Literal text of an expression."""

    text: str


@dataclass(frozen=True)
class GenPart:
    """A part that the model generates, with its settings."""

    name: str | None
    settings: GenSettings


@dataclass(frozen=True)
class SelectPart:
    """One of several choices, the one with the highest mean log-probability."""

    name: str | None
    choices: tuple[str, ...]


@dataclass(frozen=True)
class BeginRole:
    """Start of a chat turn."""

    role: str


@dataclass(frozen=True)
class EndRole:
    """End of a chat turn."""


Part = TextPart | GenPart | SelectPart | BeginRole | EndRole


@dataclass(frozen=True)
class Expression:
    """A sequence of parts. `+` concatenates expressions and strings."""

    parts: tuple[Part, ...]

    def __add__(self, other: str | Expression) -> Expression:
        return Expression(self.parts + as_expression(other).parts)

    def __radd__(self, other: str) -> Expression:
        return as_expression(other) + self

    def __format__(self, _: str) -> NoReturn:
        """Refuse f-strings, which would silently insert the repr."""
        raise TypeError("an expression cannot be formatted into a string; write text + fp.gen(...) + text")


def as_expression(value: str | Expression) -> Expression:
    """Convert a string to an expression."""
    if isinstance(value, Expression):
        return value
    if not isinstance(value, str):
        raise TypeError(f"a state takes strings, fp.gen, fp.select and turns such as fp.user; not {value!r}")
    return Expression((TextPart(value),) if value else ())


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Sequence[str] | None = None,
    **settings: Any,
) -> Expression:
    """Generate text here and store it as `s[name]`.

    `settings` are the sampling fields of `SamplingParams` (`temperature`, `stop`, `seed` and so on), SGLang's
    `max_new_tokens`, one of `regex`, `json_schema` and `grammar` (Lark, or a `GrammarSpec`), `prediction` (the
    expected output), and `speculation` (a `SpeculationChoice`). With `choices` it is `select`.
    """
    _check_name(name)
    if choices is not None:
        if max_tokens is not None or any(value is not None for value in settings.values()):
            raise RequestError("choices", "cannot be combined with other settings; leave those out")
        return select(name, choices)
    return Expression((GenPart(name, GenSettings.read({"max_tokens": max_tokens, **settings})),))


def select(name: str | None = None, choices: Sequence[str] = (), temperature: float = 0.0) -> Expression:
    """Select the choice with the highest mean log-probability per token and store it as `s[name]`."""
    _check_name(name)
    if isinstance(choices, str) or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError("choices", "must be a list of non-empty strings")
    if not choices or len(set(choices)) < len(choices):
        raise RequestError("choices", "must have at least one string and no duplicates")
    if temperature != 0:
        raise RequestError("temperature", "has no effect on select, which takes the most likely choice; leave it out")
    return Expression((SelectPart(name, tuple(choices)),))


def system(content: str | Expression) -> Expression:
    """Return an expression that appends a system turn."""
    return _turn("system", content)


def user(content: str | Expression) -> Expression:
    """Return an expression that appends a user turn."""
    return _turn("user", content)


def assistant(content: str | Expression) -> Expression:
    """Append an assistant turn, which may contain generations."""
    return _turn("assistant", content)


def _turn(role: str, content: str | Expression) -> Expression:
    parts = as_expression(content).parts
    if any(isinstance(part, BeginRole) for part in parts):
        raise RequestError(role, "is a turn and cannot contain another; append one after the other")
    if role != "assistant" and any(isinstance(part, GenPart | SelectPart) for part in parts):
        raise RequestError(role, "cannot contain generations; put generations into fp.assistant(...)")
    return Expression((BeginRole(role), *parts, EndRole()))


def _check_name(name: Any) -> None:
    if name is not None and not (isinstance(name, str) and name):
        raise RequestError("name", f"must be a string such as 'answer', not {name!r}")
