"""Halves of characters: JSON can say them, but no text has them, and whoever wrote one on would fail."""

from __future__ import annotations

import json
import re
from typing import Any

# A surrogate as JSON escapes it, or in bytes; pairs of the first kind are whole characters.
SUSPECT = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def half_at(body: bytes | bytearray) -> str | None:
    """The field of a body in which half a surrogate pair stands; None where there is none."""
    if SUSPECT.search(body) is None:
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None  # no JSON, which others tell
    return _find(found)


def _find(value: Any) -> str | None:
    """Without recursion: a body may be deep."""
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        place, each = left.pop()
        if isinstance(each, str) and not _is_whole(each):
            return place or "body"
        if isinstance(each, dict):
            if not all(map(_is_whole, each)):
                return place or "body"
            left += ((f"{place}.{name}".lstrip("."), inner) for name, inner in each.items())
        elif isinstance(each, list):
            left += ((f"{place}.{number}".lstrip("."), inner) for number, inner in enumerate(each))
    return None


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
