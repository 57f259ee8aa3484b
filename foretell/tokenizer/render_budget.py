"""Limits of one rendering of a chat template: steps, CPU time, and bytes in each value and in total."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

# More loop iterations and calls than any chat needs.
MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0  # of the thread's CPU time
MAX_DEPTH = 100  # levels of lists and objects
MAX_INT_BITS = 16_384
# A value may have VALUE_BYTES plus VALUE_FACTOR times the size of the input; all values together, likewise.
VALUE_BYTES, VALUE_FACTOR = 16 << 20, 4
TOTAL_BYTES, TOTAL_FACTOR = 256 << 20, 64
ITEM_BYTES = 64  # of a short string in a list

CONTAINERS: tuple[type[Any], ...] = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
SCALARS = (str, int, float, type(None))
_ACTIVE = threading.local()


class TemplateLimitError(Exception):
    """A template exceeds a limit of the sandbox."""


class RenderBudget:
    """Counts what one rendering uses, and raises TemplateLimitError where that is too much.

    Lists and dicts cannot be changed inside the sandbox, so the size of each is computed once. A size counts shared
    elements as often as they occur: that is what printing or comparing them costs.
    """

    def __init__(self, inputs: Any) -> None:
        self.steps = 0
        self._sizes: dict[int, tuple[object, int, int]] = {}  # by id: the container, its bytes, its depth
        self.value_bytes = 1 << 62  # the input itself is not limited here
        size = self.size(inputs)
        self.value_bytes = VALUE_BYTES + VALUE_FACTOR * size
        self.bytes_left = self.total_bytes = TOTAL_BYTES + TOTAL_FACTOR * size
        self._cpu_limit = time.thread_time() + MAX_SECONDS
        self._check_at = time.perf_counter() + MAX_SECONDS

    def tick(self) -> None:
        """Check the time. CPU time decides, because a busy machine says nothing about the template."""
        if time.perf_counter() > self._check_at:
            left = self._cpu_limit - time.thread_time()
            if left <= 0:
                raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s")
            self._check_at = time.perf_counter() + left

    def step(self, count: int = 0) -> None:
        """Count an iteration or a call that appends up to `count` pieces to an output buffer."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
        self.charge(8 * count)

    def charge(self, size: int) -> None:
        """Take bytes from the total."""
        self.bytes_left -= size
        if self.bytes_left < 0:
            words = f"it makes more than {self.total_bytes} bytes of values"
            raise TemplateLimitError(f"{words}; use a shorter chat, or a template that copies less")
        self.tick()

    def admit(self, size: int) -> None:
        """Refuse a value of this size, before it is made where possible."""
        if size > self.value_bytes:
            raise TemplateLimitError(f"a value of {size} bytes is too large; at most {self.value_bytes}")

    def admit_items(self, count: int) -> None:
        """Refuse a list of so many new strings."""
        self.admit(count * ITEM_BYTES)

    def made(self, value: Any) -> Any:
        """Count a value that an operation returned, and return it."""
        if isinstance(value, str):
            size = value.__sizeof__()
            self.admit(size)
            self.charge(size)
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise TemplateLimitError(f"an integer has more than {MAX_INT_BITS} bits")
        elif isinstance(value, CONTAINERS):
            self.size(value)
            self.charge(value.__sizeof__())
        return value

    def size(self, value: Any, depth: int = 0) -> int:
        """Return the bytes of a value with everything in it; too large and too deep ones are refused."""
        return self._measure(value, depth)[0]

    def depth(self, value: Any) -> int:
        """Return how many levels of lists and objects a value has."""
        return self._measure(value, 0)[1]

    def _measure(self, value: Any, depth: int) -> tuple[int, int]:
        """Return the bytes and the nesting depth of a value."""
        if isinstance(value, SCALARS):
            return value.__sizeof__(), 0
        if (known := self._sizes.get(id(value))) is not None:
            return known[1], known[2]
        if isinstance(value, range):
            return 8 * len(value), 1
        if not isinstance(value, CONTAINERS):
            return ITEM_BYTES, self._opaque(value)
        if depth > MAX_DEPTH:
            raise TemplateLimitError(f"values are nested more than {MAX_DEPTH} deep")
        total, deepest = value.__sizeof__(), 0
        for part in chain(value, value.values()) if isinstance(value, dict) else value:
            if part.__class__ in SCALARS:  # the usual case, without a call
                total += part.__sizeof__()
                continue
            size, below = self._measure(part, depth + 1)
            total += size
            deepest = max(deepest, below)
        self.admit(total)
        if depth + deepest >= MAX_DEPTH:
            raise TemplateLimitError(f"values are nested more than {MAX_DEPTH} deep")
        self._sizes[id(value)] = (value, total, deepest + 1)
        return total, deepest + 1

    def joined(self, value: Any, left: Any, right: Any) -> Any:
        """Count a list that two were joined into, without looking at each element again."""
        sizes = [self._measure(part, 0) for part in (left, right)]
        self._sizes[id(value)] = (value, sum(size for size, _ in sizes), max(depth for _, depth in sizes))
        self.charge(value.__sizeof__())
        return value

    def _opaque(self, value: Any) -> int:
        """Refuse a namespace inside another value: it can change later, and could contain itself."""
        from jinja2.utils import Namespace

        if isinstance(value, Namespace):
            raise TemplateLimitError("a namespace cannot be stored in another value")
        return 0


def active() -> RenderBudget:
    """Return the budget of the rendering that runs in this thread; AttributeError where none does."""
    budget: RenderBudget = _ACTIVE.budget
    return budget


def rendering() -> bool:
    """Return whether a template is being rendered in this thread, rather than compiled."""
    return getattr(_ACTIVE, "budget", None) is not None


@contextmanager
def limited(inputs: Any) -> Iterator[RenderBudget]:
    """Render within a budget that grows with the size of the inputs."""
    _ACTIVE.budget = budget = RenderBudget(inputs)
    try:
        yield budget
    finally:
        del _ACTIVE.budget
