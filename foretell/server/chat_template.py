"""Applies the model's chat template to the messages and tools of a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretell.errors import RequestError
from foretell.server.openai.chat_requests import (
    ChatCompletionRequest,
    ChatMessageParam,
    FunctionDefinition,
    NamedTool,
    TokenizeRequest,
    Tool,
    ToolCall,
)

if TYPE_CHECKING:
    from foretell.tokenizer import Tokenizer

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # template variables with request fields


def apply_chat_template(
    tokenizer: Tokenizer, body: ChatCompletionRequest | TokenizeRequest, tools: Sequence[Tool] | None
) -> str:
    """Render the messages and tools of a request to the prompt text."""
    template = (tokenizer.tool_template if tools else tokenizer.chat_template) or ""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in RESERVED:
            raise RequestError(f"chat_template_kwargs.{name}", f"is reserved; set the request field {name} instead")
    if isinstance(body, ChatCompletionRequest) and body.reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise RequestError(
                "reasoning_effort", "is not a variable of this model's chat template; leave the field out"
            )
        variables["reasoning_effort"] = body.reasoning_effort
    add_generation_prompt = body.add_generation_prompt if isinstance(body, TokenizeRequest) else True
    messages = [_message_variables(message, i, template) for i, message in enumerate(body.messages or [])]
    text = tokenizer.apply_chat_template(
        messages,
        tools=None if tools is None else [_tool_variables(tool) for tool in tools],
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    try:
        text.encode()
    except UnicodeEncodeError:  # the arguments of tool calls are JSON inside JSON, which can hide a surrogate
        raise RequestError("messages", "contain an unpaired surrogate; send valid Unicode") from None
    return text


def _message_variables(message: ChatMessageParam, index: int, template: str) -> dict[str, Any]:
    variables = message.model_dump(exclude_none=True, exclude={"tool_calls", "refusal"})
    if message.role == "developer" and "developer" not in template:
        variables["role"] = "system"  # OpenAI's newer name for the system role
    if message.content is None and message.refusal is not None:
        variables["content"] = message.refusal
    if message.tool_calls:
        variables["tool_calls"] = [
            {**call.model_dump(exclude_none=True), "function": _function_call(call, index)}
            for call in message.tool_calls
        ]
    return variables


def _function_call(call: ToolCall, index: int) -> dict[str, Any]:
    """Return the call with its arguments as an object: templates serialize them to JSON themselves."""
    name = call.function.name
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"messages.{index}.tool_calls", f"the arguments of {name} are not a JSON object")
    return {"name": name, "arguments": arguments}


def _tool_variables(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


def select_tools(body: ChatCompletionRequest, tool_parser: str | None) -> list[Tool]:
    """Return the tools for the prompt: none if the request has none or forbids tool calls."""
    if not body.tools:
        if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
            raise RequestError("tool_choice", "requires a tool call, but the request has no tools; add some")
        return []
    if body.tool_choice == "none":
        return []
    if tool_parser is None:
        raise RequestError("tools", "are not supported by this model's chat template; leave them out")
    return body.tools


def forced_functions(body: ChatCompletionRequest, tools: Sequence[Tool]) -> list[FunctionDefinition]:
    """Return the functions of which the model must call one; empty if it may answer without a call."""
    functions = [tool.function for tool in tools]
    if body.tool_choice == "required":
        return functions
    if not isinstance(body.tool_choice, NamedTool):
        return []
    name = body.tool_choice.function.name
    matching = [function for function in functions if function.name == name]
    if not matching:
        known = ", ".join(function.name for function in functions)
        raise RequestError("tool_choice", f"there is no tool {name!r}; the tools are {known}")
    return matching
