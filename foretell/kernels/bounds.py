"""Bounds checks for native code, which does not check its arguments."""

from __future__ import annotations


class BoundsError(RuntimeError):
    """A native call that would access memory outside of its arrays."""


def require(holds: bool, what: str) -> None:
    """Raise BoundsError unless the condition holds. An `assert` would be removed by -O."""
    if not holds:
        raise BoundsError(f"native call refused; it needs {what}")
