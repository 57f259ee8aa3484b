"""The messages of a chat, checked and made plain before a template sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.errors import RequestError

MAX_DEPTH = 64  # of a request's values; a template may add levels of its own
REASONING = ("reasoning_content", "thinking", "reasoning")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain data, each with a role and a text; reasoning stands under every name templates look for."""
    if isinstance(messages, Mapping):
        raise RequestError("messages", "must be a list of messages; put this one into a list")
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", "must be a list of one or more messages, each with a role and a content")
    return [with_reasoning(plain(checked(message, place))) for place, message in enumerate(messages)]


def checked(message: Any, place: int) -> Mapping[str, Any]:
    """A message that has a role, and for its content a text."""
    if not isinstance(message, Mapping):
        raise RequestError("messages", f"message {place} must be an object with a role and a content")
    if not isinstance(message.get("role"), str):
        raise RequestError("messages", f"message {place} needs a role that is a text, as 'user'")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return message
    return {**message, "content": as_text(content, place)}


def as_text(content: Any, place: int) -> str:
    """A content given as one text or as a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(part_text(part, place) for part in content)
    found = "none" if content is None else type(content).__name__
    raise RequestError(
        "messages", f"message {place} needs a content that is a text or a list of text parts, not {found}"
    )


def part_text(part: Any, place: int) -> str:
    """The text of one part; nothing else can be shown to the model."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise RequestError("messages", f"message {place} has a part of type {kind!r}; this model reads text only")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError("messages", f"message {place} has a part that is not {{'type': 'text', 'text': ...}}")
    return str(part["text"])


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates differ in what they call a message's reasoning; the first name given serves for the others."""
    given = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}


def plain(value: Any, field: str = "messages", depth: int = 0) -> Any:
    """Return nothing but what JSON has, because a template has no business with the methods of our objects.

    Values nested deeper than MAX_DEPTH, as those that contain themselves, are refused under the name of `field`.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if depth >= MAX_DEPTH:
        raise RequestError(field, f"is nested too deep; at most {MAX_DEPTH} levels of lists and objects are read")
    if isinstance(value, Mapping):
        return {str(key): plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item, field, depth + 1) for item in value]
    return f"<{type(value).__name__}>"
