"""Output that a test writes instead of the tiny model, through the whole server: a grammar allows no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretell.server.preprocess import RequestPreprocessor
from foretell.structured_output import GrammarSpec

THOUGHTS, TEXT = "Rome is in Italy.", "I will look."
CALLS = [{"name": "weather", "arguments": {"city": city, "days": 2}} for city in ("Rome", "Oslo")]


def call_text(call: dict[str, Any]) -> str:
    """Return a tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def answer_text(*, thoughts: bool = True) -> str:
    """Return reasoning, text and two calls as the model writes them."""
    opening = f"{THOUGHTS}</think>\n\n" if thoughts else ""
    return opening + TEXT + "\n" + "\n".join(call_text(call) for call in CALLS)


def force_output(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make the model write `text` in every chat."""
    monkeypatch.setattr(RequestPreprocessor, "_chat_grammar", lambda *_: GrammarSpec.choice((text,)))
