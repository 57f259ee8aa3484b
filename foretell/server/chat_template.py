"""A chat as the model's template takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretell.errors import RequestError
from foretell.server.openai.chat_requests import ChatBody, Function, Message, NamedTool, TokenizeBody, Tool

if TYPE_CHECKING:
    from foretell.tokenizer import Tokenizer

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def render(tokenizer: Tokenizer, body: ChatBody | TokenizeBody, tools: Sequence[Tool] | None) -> str:
    """The text the model continues."""
    template = (tokenizer.tool_template if tools else tokenizer.chat_template) or ""
    values = dict(body.chat_template_kwargs or {})
    for name in values:
        if name in RESERVED:
            raise RequestError(f"chat_template_kwargs.{name}", "has a field of its own; use that")
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise RequestError("reasoning_effort", "this model's chat template knows no effort; leave it out")
        values["reasoning_effort"] = body.reasoning_effort
    generate = body.add_generation_prompt if isinstance(body, TokenizeBody) else True
    messages = [_message(message, place, template) for place, message in enumerate(body.messages or [])]
    described = None if tools is None else [_tool(tool) for tool in tools]
    text = tokenizer.render_chat(messages, tools=described, add_generation_prompt=generate, **values)
    try:
        text.encode()
    except UnicodeEncodeError:  # arguments of calls are JSON inside JSON, and may have hidden it
        raise RequestError("messages", "have half a surrogate pair; send valid Unicode") from None
    return text


def _message(message: Message, place: int, template: str) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude={"tool_calls", "refusal"})
    if message.role == "developer" and "developer" not in template:
        plain["role"] = "system"  # OpenAI's newer word for it
    if message.content is None and message.refusal is not None:
        plain["content"] = message.refusal
    if message.tool_calls:
        plain["tool_calls"] = [
            {**call.model_dump(exclude_none=True), "function": _function_call(call.function.name, call, place)}
            for call in message.tool_calls
        ]
    return plain


def _function_call(name: str, call: Any, place: int) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves, and want them as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"messages.{place}.tool_calls", f"the arguments of {name} are not a JSON object")
    return {"name": name, "arguments": arguments}


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


def tools_of(body: ChatBody, family: str | None) -> list[Tool]:
    """The tools the model is told of; none where it is not to call any."""
    if not body.tools:
        if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
            raise RequestError("tool_choice", "asks for a call and there are no tools; give some")
        return []
    if body.tool_choice == "none":
        return []
    if family is None:
        raise RequestError("tools", "this model's chat template takes no tools; leave them out, or take another model")
    return body.tools


def forced_functions(body: ChatBody, tools: Sequence[Tool]) -> list[Function]:
    """The functions of which one must be called; empty where the model may choose not to call."""
    functions = [tool.function for tool in tools]
    if body.tool_choice == "required":
        return functions
    if not isinstance(body.tool_choice, NamedTool):
        return []
    named = body.tool_choice.function.name
    found = [function for function in functions if function.name == named]
    if not found:
        raise RequestError(
            "tool_choice", f"there is no tool {named!r}; there are {', '.join(f.name for f in functions)}"
        )
    return found
