"""Jinja's filters and tests within the limits of the template sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import Environment, filters, pass_environment, tests

from foretell.tokenizer import bounded_text
from foretell.tokenizer.bounded_text import MAX_WIDTH
from foretell.tokenizer.render_budget import TemplateLimitError, active

# Filters that return a value which exists already, a number, or an iterator: they are only timed.
# fmt: off
TIMED = (
    "abs", "attr", "count", "d", "default", "first", "float", "items", "last", "length", "map", "max", "min",
    "random", "reject", "rejectattr", "select", "selectattr", "unique",
)
# fmt: on
# Filters whose result is counted once it is there: it is at most a small multiple of the input.
# fmt: off
COUNTED = (
    "capitalize", "dictsort", "e", "escape", "forceescape", "groupby", "lower", "reverse", "safe", "sort", "truncate",
    "upper", "urlencode",
)
# fmt: on
# fmt: off
COMPARISONS = (
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le", "in",
)
# fmt: on
MAX_DIGITS = 30  # that `round` keeps


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Return the filters by name. Those of no use in a chat and hard to bound are left out."""
    own: dict[str, Callable[..., Any]] = {
        "batch": batch,
        "center": center,
        "format": format_percent,
        "indent": indent,
        "int": as_int,
        "join": join,
        "list": as_list,
        "replace": replace,
        "round": round_number,
        "slice": sliced,
        "string": string,
        "sum": add_up,
        "tojson": to_json,
        "title": _split(filters.do_title),
        "trim": trim,
        "wordcount": _split(filters.do_wordcount),
    }
    timed = {name: _timed(filters.FILTERS[name]) for name in TIMED}
    return timed | {name: _counted(filters.FILTERS[name]) for name in COUNTED} | own


def bounded_tests() -> dict[str, Callable[..., Any]]:
    """Return the tests by name; those that compare are timed."""
    found: dict[str, Any] = {**tests.TESTS}
    return found | {name: _timed(found[name]) for name in COMPARISONS}


# Without a budget, while a template is compiled, `active` raises, so that Jinja does not fold the constant.
def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        active().tick()
        return function(*args, **kwargs)

    return call


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return active().made(function(*args, **kwargs))

    return call


def _split(function: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Bound a filter that takes a string apart into its words."""

    @wraps(function)
    def call(value: Any) -> Any:
        budget = active()
        text = bounded_text.as_text(budget, value)
        budget.admit_items(len(text))
        return budget.made(function(text))

    return call


def string(value: Any) -> str:
    """Return the value as a string."""
    return bounded_text.as_text(active(), value)


def trim(value: Any, chars: str | None = None) -> str:
    """Strip characters from both ends, by default whitespace."""
    budget = active()
    text = bounded_text.as_text(budget, value)
    bounded_text.check_search(budget, text, chars)
    result: str = budget.made(text.strip(chars))
    return result


def replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Replace a substring within the budget."""
    budget = active()
    text, old, new = (str(bounded_text.as_text(budget, part)) for part in (value, old, new))
    bounded_text.check_replace(budget, text, old, new)
    result: str = budget.made(text.replace(old, new, -1 if count is None else count))
    return result


@pass_environment
def join(environment: Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    """Join values, or an attribute of each."""
    items = value if attribute is None else map(filters.make_attrgetter(environment, attribute), value)
    budget = active()
    return bounded_text.join(budget, items, str(bounded_text.as_text(budget, d)))


def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent the lines of a string."""
    budget = active()
    text = bounded_text.as_text(budget, value)
    columns = len(width) if isinstance(width, str) else width
    _check_width(columns)
    bounded_text.check_split(budget, text)  # it takes the string apart, too
    budget.admit(len(text) + columns * len(text.splitlines()))
    result: str = budget.made(filters.do_indent(text, width, first, blank))
    return result


def center(value: Any, width: int = 80) -> str:
    """Center a string in a field."""
    budget = active()
    bounded_text.check_width(budget, "", width)
    result: str = budget.made(filters.do_center(bounded_text.as_text(budget, value), width))
    return result


def format_percent(value: Any, *args: Any, **kwargs: Any) -> str:
    """Format as printf does, within the budget."""
    budget = active()
    return bounded_text.percent(budget, bounded_text.as_text(budget, value), kwargs or args)


def as_list(value: Any) -> list[Any]:
    """Return the items as a list."""
    budget = active()
    if isinstance(value, str):
        budget.admit_items(len(value))
    found: list[Any] = budget.made(list(value))
    return found


def batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[Any]:
    """Return rows of `linecount` items."""
    budget = active()
    budget.admit_items(linecount)
    found: list[Any] = budget.made(list(filters.do_batch(as_list(value), linecount, fill_with)))
    return found


def sliced(value: Iterable[Any], slices: int, fill_with: Any = None) -> list[Any]:
    """Return columns of about as many items."""
    budget = active()
    budget.admit_items(slices)
    items = as_list(value)
    found: list[Any] = budget.made(list(filters.sync_do_slice(items, slices, fill_with)))
    return found


@pass_environment
def add_up(
    environment: Environment, value: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> float:
    """Return the sum of numbers."""
    items = value if attribute is None else map(filters.make_attrgetter(environment, attribute), value)
    for item in items:
        active().tick()
        if not isinstance(item, int | float) or not isinstance(start, int | float):
            raise TypeError("sum adds numbers only")
        start = active().made(start + item)
    return start


def as_int(value: Any, default: int = 0, base: int = 10) -> int:
    """Return the value as an integer."""
    budget = active()
    if isinstance(value, str):
        budget.admit(len(value) << 8 if len(value) > MAX_WIDTH else 0)  # parsing takes time that grows faster
    result: int = budget.made(filters.do_int(value, default, base))
    return result


def round_number(value: float, precision: int = 0, method: Any = "common") -> float:
    """Round to at most MAX_DIGITS digits."""
    if not -MAX_DIGITS <= precision <= MAX_DIGITS:
        raise TemplateLimitError(f"round keeps at most {MAX_DIGITS} digits")
    active().tick()
    return filters.do_round(value, precision, method)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as training data has it, without Jinja's escapes for HTML."""
    budget = active()
    if indent is not None:
        _check_width(len(indent) if isinstance(indent, str) else indent)
    for separator in separators or ():
        _check_width(len(separator))
    size, widest = budget.size(value), max([0, *map(len, separators or ())])
    per_line = len(indent) if isinstance(indent, str) else indent or 0
    budget.admit(size + size // 24 * (widest + per_line * budget.depth(value)))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    result: str = budget.made(text)
    return result


def _check_width(width: int) -> None:
    if width > MAX_WIDTH:
        raise TemplateLimitError(f"an indentation or a separator has more than {MAX_WIDTH} characters")


def concat(values: tuple[Any, ...]) -> str:
    """Join the operands of `~` within the budget."""
    return bounded_text.join(active(), values)


def made(value: Any) -> Any:
    """Charge a literal of the template to the budget."""
    return active().made(value)


def part(value: Any) -> Any:
    """Count a slice, which has no more in it than what it was taken from."""
    active().charge(value.__sizeof__())
    return value


def stored(value: Any) -> Any:
    """Measure what is assigned to an attribute of a namespace."""
    active().size(value)
    return value


def timed(value: Any) -> Any:
    """Check the time after a comparison."""
    active().tick()
    return value


def step(outputs: int) -> bool:
    """Count an iteration of a loop, or a call of a macro."""
    active().step(outputs)
    return True


INTERNAL = {"_concat": concat, "_made": made, "_part": part, "_stored": stored, "_timed": timed, "_step": step}
