"""Options are declared once, as fields of frozen dataclasses; flags, help, checks and messages all come from there."""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import RequestError

T = TypeVar("T")


def option(
    default: Any, help: str, *, aliases: tuple[str, ...] = (), choices: tuple[str, ...] = (), several: bool = False
) -> Any:
    """A dataclass field that is also a command-line flag; `aliases` are the flags of other systems for it, `several`
    says that one flag may take more than one value."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "choices": choices, "several": several})


def nearest(name: str, known: Iterable[str]) -> str:
    """Words for a message: the known name closest to `name`, or all of them where none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def strict(cls: type[T]) -> type[T]:
    """Make a dataclass refuse unknown arguments with the nearest right name, and values of the wrong kind by name."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    init = cls.__init__

    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in known:
                raise TypeError(f"{cls.__name__} has no argument {name!r}; {nearest(name, known)}")
            check_kind(name, value, get_type_hints(cls)[name])
        init(self, *args, **kwargs)

    checked.__wrapped__ = init  # type: ignore[attr-defined]
    cls.__init__ = checked  # type: ignore[assignment]
    return cls


KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}


def check_kind(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not of its field's kind; kinds that are not simple check themselves."""
    kind = plain_type(hint)
    if kind not in KINDS or (value is None and kind is not hint):
        return
    kinds, words = KINDS[kind]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(name, f"must be {words}, not {value!r}")


def resolve_alias(name: str, cls: type) -> str:
    """The field of `cls` that other systems call `name`, or `name` itself."""
    flag = "--" + name.replace("_", "-")
    return next((f.name for f in fields(cls) if flag in f.metadata.get("aliases", ())), name)


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
            if f.metadata["several"]:
                settings |= {"action": "extend", "nargs": "+"}
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
        kinds = [a for a in get_args(hint) if a is not type(None)]
        return kinds[0] if len(kinds) == 1 else hint
    return hint
