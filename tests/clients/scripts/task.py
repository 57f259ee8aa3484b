"""The task of every client: list models, answer, stream, call the tool `read_notes`, answer from its result."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

URL = sys.argv[1]
MODEL = "tiny"
QUESTION = "Which word do the notes have?"
ANSWER = "The word is walnut."
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def read_notes(path: str) -> str:
    """Return the text of the notes."""
    return Path(path).read_text()


def check_answer(answer: str | None) -> None:
    assert answer == ANSWER, answer


def check_stream(parts: Iterable[str | None]) -> None:
    """Check a streamed answer: it comes in several parts."""
    texts = [part for part in parts if part]
    assert "".join(texts) == ANSWER and len(texts) > 1, texts
