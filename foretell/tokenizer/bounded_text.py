"""String operations of the template sandbox, each checked before it can make a huge string or run for long."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from foretell.tokenizer.render_budget import RenderBudget, TemplateLimitError

MAX_WIDTH = 1000  # of a padded field, an indentation, or a precision
MAX_COMPARISONS = 1 << 30  # characters compared by searches whose cost is the product of two lengths
LONG = 1 << 16  # characters; shorter strings cannot be split into too many
SPACES = (
    " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
)
# What follows `%` and a key: flags, width, precision, length and conversion, as Python reads them.
CONVERSION = re.compile(r"[#0\- +]*(\*|\d+)?(?:\.(\*|\d+)?)?[hlL]?.?", re.S)
PARENTHESIS = re.compile(r"[()]")
NUMBER = re.compile(r"\d+")

# fmt: off
STRING_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
    "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
    "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper", "zfill",
))
# fmt: on


def call_method(budget: RenderBudget, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of a string."""
    name: str = method.__name__
    text: str = method.__self__  # type: ignore[attr-defined]
    if name in CHECKS and args:
        args = CHECKS[name](budget, text, *args) or args
    elif name in ("split", "rsplit", "splitlines"):
        check_split(budget, text, *args, **kwargs)
    result = method(*args, **kwargs)
    if isinstance(result, list | tuple):  # of new strings
        budget.charge(budget.size(result))
        return result
    return budget.made(result)


def check_width(budget: RenderBudget, _: str, width: Any, *__: Any) -> None:
    """Refuse padding to a huge width."""
    budget.admit(int(width))


def check_replace(budget: RenderBudget, text: str, old: str, new: str = "", *_: Any) -> None:
    """Refuse a replacement whose result is huge."""
    if len(new) > len(old):
        budget.admit(len(text) + text.count(old) * (len(new) - len(old)))


def check_search(budget: RenderBudget, text: str, wanted: Any = None, *_: Any) -> None:
    """Refuse a search that may compare each character of one string with each of another."""
    if isinstance(wanted, str) and len(text) * len(wanted) > MAX_COMPARISONS:
        raise TemplateLimitError(f"a search for {len(wanted)} characters in {len(text)} takes too long")


def check_split(budget: RenderBudget, text: str, sep: Any = None, *_: Any, **kwargs: Any) -> None:
    """Refuse a split into too many strings."""
    sep = kwargs.get("sep", sep)
    check_search(budget, text, sep)
    if len(text) > LONG:
        separators = sep if isinstance(sep, str) and sep else SPACES
        found = text.count(separators) if separators is sep else sum(map(text.count, separators))
        budget.admit_items(min(found, len(text)) + 1)


def check_join(budget: RenderBudget, text: str, pieces: Iterable[str], *_: Any) -> tuple[list[str]]:
    """Refuse to join pieces into a huge string; return them as a list."""
    found = list(pieces)
    budget.size(found)
    budget.admit(sum(map(len, found)) + len(text) * len(found))
    return (found,)


CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), check_width),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"), check_search),
    "replace": check_replace,
    "join": check_join,
}
# `split` and its kin take their arguments by name too.
assert not CHECKS.keys() & {"split", "rsplit", "splitlines"}


def percent(budget: RenderBudget, text: str, values: Any) -> str:
    """Return `text % values`, or refuse a result that exceeds the budget."""
    budget.admit_items(text.count("%"))
    for width in widths_of(text):
        check_number(width)
    parts = values if isinstance(values, tuple) else values.values() if isinstance(values, dict) else (values,)
    largest = max((budget.size(part) for part in parts), default=0)
    budget.admit(len(text) + text.count("%") * (largest + MAX_WIDTH))
    result: str = budget.made(text % values)
    return result


def widths_of(text: str) -> Iterator[str]:
    """Yield the widths and precisions of a printf format."""
    at = text.find("%")
    while at >= 0:
        begin = end_of_key(text, at + 1) if text.startswith("(", at + 1) else at + 1
        found = CONVERSION.match(text, begin)
        assert found is not None  # it matches the empty string, too
        yield from found.groups("")
        at = text.find("%", found.end())


def end_of_key(text: str, begin: int) -> int:
    """Return where a key in parentheses ends, which can have others inside; without an end, Python raises an error."""
    depth = 0
    for found in PARENTHESIS.finditer(text, begin):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.end()
    return len(text)


def check_spec(spec: str) -> None:
    """Refuse a format specifier with a huge width or precision."""
    for number in NUMBER.findall(spec):
        check_number(number)


def check_number(number: str) -> None:
    if number == "*" or (number and (len(number) > 4 or int(number) > MAX_WIDTH)):
        raise TemplateLimitError(f"a format has a width above {MAX_WIDTH}")


def as_text(budget: RenderBudget, value: Any) -> str:
    """Return `str(value)`, refused where that is huge."""
    if isinstance(value, str):
        return value
    budget.admit(budget.size(value))
    result: str = budget.made(str(value))
    return result


def join(budget: RenderBudget, pieces: Iterable[Any], separator: str = "") -> str:
    """Return the pieces as one string."""
    texts = [as_text(budget, piece) for piece in pieces]
    budget.admit(sum(map(len, texts)) + len(separator) * len(texts))
    result: str = budget.made(separator.join(texts))
    return result
