"""Tools for models whose chat template knows none: described in the system turn, called in the Hermes format.

Calls and results of earlier turns become text of ordinary turns, so that any chat template takes them. Contents are
strings here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

GENERIC_PARSER = "hermes"  # the parser that reads the calls described here
INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
FORMAT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

Message = dict[str, Any]


def knows_tools(template: str | None) -> bool:
    """Return whether a chat template renders tools; a model without a template has no chats at all."""
    return template is None or "tools" in template


def describe_tools(tools: Sequence[Message]) -> str:
    """Return the text of the system turn that describes the tools and the format of a call."""
    return INTRODUCTION + "\n".join(map(_json, tools)) + FORMAT


def as_plain_turns(messages: Sequence[Message]) -> list[Message]:
    """Return messages without tool calls and without the role `tool`: calls and results become tagged text.

    Results in a row are one user turn, as in the templates of Hermes and Qwen: many templates insist that roles
    alternate.
    """
    turns: list[Message] = []
    texts: list[list[Any]] = []  # of each turn; joined at the end, because a history may have a hundred thousand
    in_results = False
    for message in messages:
        is_result = message.get("role") == "tool"
        text = _result_text(message) if is_result else _call_text(message)
        if in_results and message.get("role") in ("tool", "user"):
            texts[-1].append(text)
        else:
            rest = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
            turns.append({**rest, "role": "user" if is_result else message["role"]})
            texts.append([text])
        in_results = is_result
    return [
        {**turn, "content": parts[0] if len(parts) == 1 else "\n".join(parts)}
        for turn, parts in zip(turns, texts, strict=True)
    ]


def with_system_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages whose system turn ends with `text`; without one, it becomes the first turn."""
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _result_text(message: Message) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def _call_text(message: Message) -> Any:
    """Return the content of a message with its calls after it, in the format that the model is asked to use."""
    calls = message.get("tool_calls")
    if not calls:
        return message.get("content")
    texts = [f"<tool_call>\n{_call_json(call['function'])}\n</tool_call>" for call in calls]
    return "\n".join([text for text in (message.get("content"), *texts) if text])


def _call_json(function: Message) -> str:
    return f'{{"name": {_json(function["name"])}, "arguments": {function["arguments"]}}}'  # as it was generated


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
