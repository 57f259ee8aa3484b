"""Options, declared once as fields of frozen dataclasses, from which flags, help, checks and messages are derived."""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Iterable
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import RequestError

T = TypeVar("T")


CLOSE = 0.6  # similarity from which one of a few names is worth suggesting
VERY_CLOSE = 0.75  # the same for one of hundreds of flags, some of which are similar by chance
MISTYPED = 3  # the same: most characters added or left out; long names of other options differ in more


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    several: bool = False,
    common: bool = False,
    metavar: str | None = None,
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    `aliases` are the flags of other systems for it; with `several` one flag may take more than one value. The short
    help has the `common` options of a class, or all if none is. `metavar` is the placeholder of the value.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "aliases": aliases,
            "choices": choices,
            "several": several,
            "common": common,
            "metavar": metavar,
        },
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a message: the known name closest to `name`, or all of them if none is close."""
    known = list(known)
    close = closest(name, known)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(sorted(known))}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`; None if none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=CLOSE)), None)


def nearest_flag(flag: str, parser: argparse.ArgumentParser) -> str:
    """Return a hint for an unknown flag to append to a message; empty if no flag of the help is very similar."""
    known = parser._option_string_actions.items()
    names = {name.lstrip("-"): name for name, action in known if action.help != argparse.SUPPRESS}
    close = very_close(flag.lstrip("-"), names)
    return f"; did you mean '{names[close]}'?" if close else ""


def very_close(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that differs from `name` by a typing error, if there is one."""
    found = next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=VERY_CLOSE)), None)
    if found is None:
        return None
    letters = len(name) + len(found)
    mistyped = letters * (1 - difflib.SequenceMatcher(None, found, name).ratio())
    return found if round(mistyped) <= MISTYPED else None


def strict(cls: type[T]) -> type[T]:
    """Make a dataclass reject unknown arguments, with the closest known name, and values of the wrong type."""
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


TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}


def check_kind(name: str, value: Any, hint: Any) -> None:
    """Raise for a value that does not have its field's type; types that are not simple are checked elsewhere."""
    kind = plain_type(hint)
    if kind not in TYPES or (value is None and kind is not hint):
        return
    accepted, description = TYPES[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(name, f"must be {description}, not {value!r}")


def resolve_alias(name: str, cls: type) -> str:
    """Return the field of `cls` that other systems call `name`, or `name` itself."""
    flag = "--" + name.replace("_", "-")
    return next((f.name for f in fields(cls) if flag in f.metadata.get("aliases", ())), name)


def add_options(
    parser: argparse._ActionsContainer, cls: type, *, skip: frozenset[str] = frozenset(), rare: bool = False
) -> None:
    """Add a flag to `parser` for each field of `cls`. Flags left out are absent from the namespace.

    With `rare` none of them is in the short help.
    """
    hints = get_type_hints(cls)
    all_common = not rare and not any(f.metadata.get("common") for f in fields(cls))
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
            settings |= {"type": kind, "metavar": "N" if kind in (int, float) else f.name.rpartition("_")[2].upper()}
        if f.metadata["choices"]:
            settings |= {"choices": f.metadata["choices"], "metavar": None}
        if f.metadata["metavar"]:
            settings["metavar"] = f.metadata["metavar"]
        action = parser.add_argument(*flags, **settings)
        action.is_common = f.metadata["common"] or all_common  # type: ignore[attr-defined]


def is_common(action: argparse.Action) -> bool:
    """Return whether an argument belongs in the short help; those that a command adds itself do."""
    return bool(getattr(action, "is_common", True))


def help_text(f: Any) -> str:
    """Return the help of a field with its choices, unless the placeholder of the value lists them, and its default."""
    placeholder, choices = f.metadata["metavar"], f.metadata["choices"]
    listed = f": {', '.join(choices)}" if choices and placeholder and not placeholder.startswith("{") else ""
    default = "" if f.default in (None, MISSING, (), "") else f" (default: {f.default})"
    return f"{f.metadata['help']}{listed}{default}".replace("%", "%%")


def given_options(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the fields of `cls` set on the command line, ready for its constructor."""
    given = {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def plain_type(hint: Any) -> Any:
    """Return the type without None: `int | None` is an int that may be left out."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [a for a in get_args(hint) if a is not type(None)]
        return kinds[0] if len(kinds) == 1 else hint
    return hint
