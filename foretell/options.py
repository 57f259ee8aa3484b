"""Options are declared once, as fields of frozen dataclasses; flags, help, checks and messages all come from there."""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def option(default: Any, help: str, *, aliases: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is also a command-line flag; `aliases` are the flags of other systems for it."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "choices": choices})


def nearest(name: str, known: Iterable[str]) -> str:
    """Words for a message: the known name closest to `name`, or all of them where none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def strict(cls: type[T]) -> type[T]:
    """Make a dataclass refuse unknown arguments with the nearest right name."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    init = cls.__init__

    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no argument {name!r}; {nearest(name, known)}")
        init(self, *args, **kwargs)

    checked.__wrapped__ = init  # type: ignore[attr-defined]
    cls.__init__ = checked  # type: ignore[assignment]
    return cls


def add_options(parser: argparse._ActionsContainer, cls: type, *, skip: frozenset[str] = frozenset()) -> None:
    """Give `parser` a flag for each field of `cls`. Flags left out are absent from the namespace."""
    hints = get_type_hints(cls)
    for f in fields(cls):
        if "help" not in f.metadata or f.name in skip:
            continue
        flags = ["--" + f.name.replace("_", "-"), *f.metadata["aliases"]]
        kind = plain_type(hints[f.name])
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text(f), "dest": f.name}
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is tuple:
            settings |= {"action": "append", "metavar": "TEXT", "type": get_args(kind)[0]}
        else:
            settings |= {"type": kind, "metavar": f.name.upper()}
        if f.metadata["choices"]:
            settings |= {"choices": f.metadata["choices"], "metavar": None}
        parser.add_argument(*flags, **settings)


def help_text(f: Any) -> str:
    """The field's help with its default."""
    shown = "" if f.default in (None, MISSING, (), "") else f" (default: {f.default})"
    return str(f.metadata["help"]).replace("%", "%%") + shown.replace("%", "%%")


def given_options(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of `cls` the user set on the command line, ready for its constructor."""
    given = {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def plain_type(hint: Any) -> Any:
    """`int | None` is an int that may be left out."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [a for a in get_args(hint) if a is not type(None)]
    return hint
