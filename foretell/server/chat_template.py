"""Applies the model's chat template to the messages, tool calls and tools of a request."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from foretell.errors import RequestError
from foretell.server.generic_tools import (
    as_plain_turns,
    describe_tools,
    knows_tools,
    with_system_text,
)
from foretell.server.history import parts_text
from foretell.server.json_schemas import RESERVED_VARIABLES
from foretell.server.openai.chat_requests import (
    MAY_BE_EMPTY,
    ChatCompletionRequest,
    ChatMessageParam,
    FunctionDefinition,
    NamedTool,
    TokenizeRequest,
    Tool,
    ToolCall,
)
from foretell.server.parsers.tools.base import BracketTracker
from foretell.server.turns import fit_turns
from foretell.tokenizer.chat import MAX_DEPTH, as_text

if TYPE_CHECKING:
    from foretell.tokenizer import Tokenizer


def apply_chat_template(
    tokenizer: Tokenizer, body: ChatCompletionRequest | TokenizeRequest, tools: Sequence[Tool] | None
) -> str:
    """Render the messages and tools of a request to the prompt text."""
    template = (tokenizer.tool_template if tools else tokenizer.chat_template) or ""
    add_generation_prompt = body.add_generation_prompt if isinstance(body, TokenizeRequest) else True
    messages = [_message_variables(message, i, template) for i, message in enumerate(body.messages or [])]
    tool_variables = [_tool_variables(tool) for tool in tools or ()]
    if not knows_tools(template):
        messages = as_plain_turns(messages)
        messages = with_system_text(messages, describe_tools(tool_variables)) if tool_variables else messages
        tool_variables = []
    messages = fit_turns(messages, tokenizer.turn_rules(with_tools=bool(tool_variables)))
    text = tokenizer.apply_chat_template(
        messages,
        tools=tool_variables or None,
        add_generation_prompt=add_generation_prompt,
        **_template_variables(body, template),
    )
    try:
        text.encode()
    except UnicodeEncodeError:  # the arguments of tool calls are JSON inside JSON, which can hide a surrogate
        raise RequestError("messages", "contain an unpaired surrogate; send valid Unicode") from None
    return text


def _template_variables(body: ChatCompletionRequest | TokenizeRequest, template: str) -> dict[str, Any]:
    """Return the variables of the request; a reasoning effort that the template does not use has no effect."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise RequestError(f"chat_template_kwargs.{name}", f"is reserved; set the request field {name} instead")
    effort = body.reasoning_effort if isinstance(body, ChatCompletionRequest) else None
    if effort is not None and "reasoning_effort" in template:
        variables["reasoning_effort"] = effort
    return variables


def _message_variables(message: ChatMessageParam, index: int, template: str) -> dict[str, Any]:
    variables = message.model_dump(exclude_none=True, exclude={"tool_calls", "refusal"})
    if message.role == "developer" and "developer" not in template:
        variables["role"] = "system"  # OpenAI's newer name for the system role
    if message.content is not None:
        is_history = message.role in MAY_BE_EMPTY
        variables["content"] = parts_text(message.content) if is_history else as_text(message.content, index)
    elif message.refusal is not None:
        variables["content"] = message.refusal
    elif message.role in MAY_BE_EMPTY and not message.tool_calls:
        variables["content"] = ""
    if message.tool_calls:
        parse = call_arguments if knows_tools(template) else str
        variables["tool_calls"] = [
            {**call.model_dump(exclude_none=True), "function": _function_call(call, parse)}
            for call in message.tool_calls
        ]
    return variables


def _function_call(call: ToolCall, parse: Callable[[str], Any]) -> dict[str, Any]:
    return {"name": call.function.name, "arguments": parse(call.function.arguments or "{}")}


def _tool_variables(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


NO_TOOLS = (
    "cannot be used: no tool call format is set or known for this model's chat template; leave them out, or start the "
    "server with --tool-call-parser"
)


def select_tools(body: ChatCompletionRequest, tool_parser: str | None) -> list[Tool]:
    """Return the tools for the prompt: none if the request has none or forbids tool calls."""
    if not body.tools:
        if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
            raise RequestError("tool_choice", "requires a tool call, but the request has no tools; add some")
        return []
    if body.tool_choice == "none":
        return []
    if tool_parser is None:
        raise RequestError("tools", NO_TOOLS)
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
    cuts: deque[tuple[int, str]] = deque(maxlen=MAX_CUTS - 1)  # a length, and what closes the text there
    for i, char in enumerate(text):
        depth = brackets.depth
        brackets.push(char)
        if brackets.depth > depth:
            opened.append(CLOSERS[char])
            if len(opened) > MAX_DEPTH:
                return []
            cuts.append((i + 1, "".join(reversed(opened))))
        elif brackets.depth < depth:
            opened = opened[:-1]
        elif char == "," and not brackets.quoted:
            cuts.append((i, "".join(reversed(opened))))
    if not opened:  # nothing is missing at its end
        return []
    end = ('"' if brackets.quoted else "") + "".join(reversed(opened))
    return [text[:length] + rest for length, rest in (*cuts, (len(text), end))]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
