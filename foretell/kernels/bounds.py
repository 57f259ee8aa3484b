"""Checks of what native code reads and writes: it trusts the numbers it is given."""

from __future__ import annotations


class BoundsError(RuntimeError):
    """A native call was refused because it would read or write outside of its arrays."""


def require(holds: bool, what: str) -> None:
    """Raise BoundsError unless a condition that protects native memory holds; an `assert` would vanish under -O."""
    if not holds:
        raise BoundsError(f"native call refused; it needs {what}")
