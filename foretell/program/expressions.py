"""What a program appends to its state: texts, generations, choices, turns of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from foretell.errors import RequestError

from .settings import Settings


@dataclass(frozen=True)
class Text:
    """Words of the program's own."""

    text: str


@dataclass(frozen=True)
class Gen:
    """Words the model is to write."""

    name: str | None
    settings: Settings


@dataclass(frozen=True)
class Select:
    """One of several texts, the one the model finds likeliest."""

    name: str | None
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Begin:
    """A turn of a chat begins."""

    role: str


@dataclass(frozen=True)
class End:
    """The turn ends."""


Part = Text | Gen | Select | Begin | End


@dataclass(frozen=True)
class Expression:
    """Parts in a row. `+` joins expressions and texts."""

    parts: tuple[Part, ...]

    def __add__(self, other: str | Expression) -> Expression:
        return Expression(self.parts + expression(other).parts)

    def __radd__(self, other: str) -> Expression:
        return expression(other) + self

    def __format__(self, _: str) -> NoReturn:
        """In an f-string it would become its own description, unnoticed."""
        raise TypeError("a generation cannot stand inside a text; write text + fp.gen(...) + text")


def expression(value: str | Expression) -> Expression:
    """A text is an expression too."""
    if isinstance(value, Expression):
        return value
    if not isinstance(value, str):
        raise TypeError(f"a state takes texts, fp.gen, fp.select and turns such as fp.user; not {value!r}")
    return Expression((Text(value),) if value else ())


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Sequence[str] | None = None,
    **settings: Any,
) -> Expression:
    """What the model writes here, kept as `s[name]`.

    `settings` are those of `SamplingParams` that decide a text (`temperature`, `stop`, `seed` and so on), SGLang's
    `max_new_tokens`, one of `regex`, `json_schema` and `grammar` (Lark, or a `GrammarSpec`), `prediction`, the text
    that is expected, and a `SpeculationChoice` as `speculation`. With `choices` it is `select`.
    """
    _check_name(name)
    if choices is not None:
        if max_tokens is not None or any(value is not None for value in settings.values()):
            raise RequestError("choices", "are chosen from as they are; leave the other settings out")
        return select(name, choices)
    return Expression((Gen(name, Settings.read({"max_tokens": max_tokens, **settings})),))


def select(name: str | None = None, choices: Sequence[str] = (), temperature: float = 0.0) -> Expression:
    """The choice with the highest mean log-probability per token, kept as `s[name]`."""
    _check_name(name)
    if isinstance(choices, str) or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError("choices", "must be a list of texts of at least one character")
    if not choices or len(set(choices)) < len(choices):
        raise RequestError("choices", "must be at least one text, and none of them twice")
    if temperature != 0:
        raise RequestError("temperature", "does not bear on select, which takes the likeliest; leave it out")
    return Expression((Select(name, tuple(choices)),))


def system(content: str | Expression) -> Expression:
    """A turn that tells the model what it is to do."""
    return _turn("system", content)


def user(content: str | Expression) -> Expression:
    """A turn of the user."""
    return _turn("user", content)


def assistant(content: str | Expression) -> Expression:
    """A turn of the model: the place for generations in a chat."""
    return _turn("assistant", content)


def _turn(role: str, content: str | Expression) -> Expression:
    parts = expression(content).parts
    if any(isinstance(part, Begin) for part in parts):
        raise RequestError(role, "is a turn and cannot hold another; put one after the other")
    if role != "assistant" and any(isinstance(part, Gen | Select) for part in parts):
        raise RequestError(role, "is not written by the model; put generations into fp.assistant(...)")
    return Expression((Begin(role), *parts, End()))


def _check_name(name: Any) -> None:
    if name is not None and not (isinstance(name, str) and name):
        raise RequestError("name", f"must be a text such as 'answer', not {name!r}")
