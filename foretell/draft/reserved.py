"""Checks the pages of a sequence before native code writes to them."""

from __future__ import annotations

from foretell.types import Sequence


def check_reserved(seq: Sequence, tokens: int, page_size: int) -> None:
    """Raise if the pages of a sequence hold fewer than `tokens` tokens: native code does not check its bounds."""
    if tokens > len(seq.pages) * page_size:
        slots = len(seq.pages) * page_size
        raise RuntimeError(f"a draft needs {tokens} slots and {slots} are reserved for sequence {seq.id}")
