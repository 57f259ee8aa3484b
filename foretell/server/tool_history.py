"""Tool calls of earlier turns: their arguments as an object, also where the output was cut or is no JSON."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from foretell.server.parsers.tools.base import BracketTracker
from foretell.tokenizer.chat import MAX_DEPTH

CLOSERS = {"{": "}", "[": "]"}
MAX_CUTS = 4  # places at which a text is cut back: its end, and the last brackets and commas


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object: templates serialize them, or go through them by name.

    max_tokens may have cut the text; it is completed then. Text that is no JSON object is kept under one name.
    """
    value = _parsed(text)
    if value is None:
        value = _completed(text)
    return value if isinstance(value, dict) else {"arguments": text}


def _completed(text: str) -> Any:
    """Return the value of a JSON text whose end is missing: what is complete of it, with its brackets closed."""
    for start in reversed(_cuts(text)):
        value = _parsed(start)
        if value is not None:
            return value
    return None


def _cuts(text: str) -> list[str]:
    """Return the text with its brackets closed, cut at its end and at the last places between values."""
    brackets, opened = BracketTracker(), []
    places: deque[tuple[int, str]] = deque(maxlen=MAX_CUTS - 1)  # a length, and what closes the text there
    for i, char in enumerate(text):
        depth = brackets.depth
        brackets.push(char)
        if brackets.depth > depth:
            opened.append(CLOSERS[char])
            if len(opened) > MAX_DEPTH:
                return []
            places.append((i + 1, "".join(reversed(opened))))
        elif brackets.depth < depth:
            opened = opened[:-1]
        elif char == "," and not brackets.quoted:
            places.append((i, "".join(reversed(opened))))
    if not opened:  # nothing is missing at its end
        return []
    end = ('"' if brackets.quoted else "") + "".join(reversed(opened))
    return [text[:length] + rest for length, rest in (*places, (len(text), end))]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
