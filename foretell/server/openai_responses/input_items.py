"""Translation of the input items of /v1/responses to chat messages, and of an output to the message it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretell.errors import RequestError
from foretell.server.choice_state import ChoiceState
from foretell.server.history import omitted, parts_text
from foretell.server.translation import Block, string_field, text_of, tool_call

Message = dict[str, Any]  # a chat message
ASSISTANT = "assistant"
ROLES = ("user", "system", "developer", ASSISTANT)
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
BETWEEN_THOUGHTS = "\n\n"
HOSTED_ITEMS = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")  # items of tools that a server runs
NOT_TAKEN = {
    "item_reference": "refers to an item that is not stored; send the item itself, or previous_response_id",
    "input_image": "is an image; this model takes text only, leave it out",
    "input_file": "is a file; this model takes text only, leave it out",
    "input_audio": "is audio; this model takes text only, leave it out",
}


def chat_messages(items: Sequence[Block]) -> list[Message]:
    """Return the chat messages of input items. Reasoning, text and calls of one turn become one message."""
    messages: list[Message] = []
    for i, item in enumerate(items):
        message = _message(item, f"input.{i}")
        if message["role"] == "assistant" and messages and _continues(messages[-1], message):
            _extend(messages[-1], message)
        else:
            messages.append(message)
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = BETWEEN_THOUGHTS.join(filter(None, message["reasoning_content"]))
    return messages


def _message(item: Block, where: str) -> Message:
    """Return one item as a chat message, its reasoning as a list of texts."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        content = item.get("content")
        read = _history_text if role == ASSISTANT else _text
        return {"role": role, "content": read(content, f"{where}.content")}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return {"role": "assistant", "content": "", "reasoning_content": [_text(parts, f"{where}.content")]}
    if isinstance(kind, str) and kind.endswith("_call_output"):
        text = _history_text(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": string_field(item, "call_id", where), "content": text}
    if isinstance(kind, str) and kind.endswith("_call"):
        return _earlier_call(item, kind, where)
    if kind in HOSTED_ITEMS:
        return {"role": "assistant", "content": omitted(kind)}
    taken = "send message, function_call, function_call_output or reasoning"
    raise RequestError(where, NOT_TAKEN.get(str(kind), f"has the type {kind!r}, which is not supported; {taken}"))


def _earlier_call(item: Block, kind: str, where: str) -> Message:
    """Return a call as the assistant's. One without an id, such as web_search_call, was answered by its server."""
    name, arguments = kind.removesuffix("_call"), item.get("action") or item.get("operation") or {}
    if kind == "function_call":
        name, arguments = string_field(item, "name", where), string_field(item, "arguments", where)
    elif kind == "custom_tool_call":
        name, arguments = string_field(item, "name", where), {"input": string_field(item, "input", where)}
    elif not isinstance(item.get("call_id"), str):
        return {"role": "assistant", "content": omitted(kind)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [tool_call(string_field(item, "call_id", where), name, arguments)],
    }


def _history_text(content: Any, where: str) -> str:
    """Return the text of earlier output or of a tool's result, which may have parts of any type, or be null."""
    parts = content if isinstance(content, list) else [content]
    if content is not None and not all(isinstance(part, str | dict) for part in parts):
        raise RequestError(where, "must be a string or a list of parts")
    return parts_text(content)


def _text(content: Any, where: str) -> str:
    """Return the text of a content given as a string or as text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, "must be a string or a list of text parts")
    return "".join(_part_text(part, f"{where}.{i}") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in NOT_TAKEN:
        raise RequestError(where, NOT_TAKEN[kind])
    return text_of(part, where, TEXT_PARTS)


def _continues(last: Message, message: Message) -> bool:
    """Return whether an assistant's message belongs to the same turn as the last one."""
    return bool(last["role"] == "assistant" and not (last["content"] and message["content"]))


def _extend(last: Message, message: Message) -> None:
    last["content"] += message["content"]
    for name in ("reasoning_content", "tool_calls"):
        if name in message:
            last.setdefault(name, []).extend(message[name])


def answer_message(choice: ChoiceState) -> Message:
    """Return an output as the message that it is for the next response."""
    message: Message = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [call.as_json() for call in choice.tool_calls]
    return message
