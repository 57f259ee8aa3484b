"""Text for what a history holds besides text: earlier output of other models, and results of tools.

A client sends its history with every request, so that refusing a part of it would end the conversation. What a user
sends is refused instead: its meaning would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MAX_KIND_CHARS = 64  # of a part's type in a placeholder
UNPRINTED = re.compile(r"[^\w.\-]+", re.ASCII)
HIDDEN = ("thinking", "redacted_thinking", "reasoning")  # parts that no template shows as content
ERROR_PREFIX = "Error: "


def omitted(kind: object) -> str:
    """Return the text that stands for a part of this type."""
    name = UNPRINTED.sub("_", str(kind))[:MAX_KIND_CHARS]
    return f"[{name or 'part'} omitted]"


def part_text(part: Any) -> str:
    """Return the text of a part of any type: its own, or that of the parts within it, or a placeholder."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return omitted(type(part).__name__)
    kind = part.get("type")
    if kind in HIDDEN:
        return ""
    for name in ("text", "refusal"):
        if isinstance(part.get(name), str):
            return str(part[name])
    inner = part.get("content")
    if isinstance(inner, list):
        inner = "\n".join(filter(None, map(_own_text, inner)))
    return inner if inner and isinstance(inner, str) else omitted(kind)


def parts_text(content: Any, between: str = "") -> str:
    """Return the text of a content: a string, parts of any type, or nothing."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return part_text(content)
    return between.join(filter(None, map(part_text, content)))


def error_text(text: str) -> str:
    """Return the text of a tool's result that is an error."""
    return text if text.lower().startswith("error") else ERROR_PREFIX + text


def _own_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else ""
