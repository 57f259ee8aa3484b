"""Request bodies of /v1/messages and /v1/messages/count_tokens, and their translation to a chat completion."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretell.errors import RequestError
from foretell.server.anthropic.client_tools import client_tool, needs_images
from foretell.server.anthropic.schemas import (
    FORCED_CALL,
    NAMED_TOOL,
    SystemBlock,
    describe_contents,
    describe_tool,
)
from foretell.server.history import error_text, part_text, parts_text
from foretell.server.json_schemas import TOOL_NAME_PATTERN, SchemaFormat, Stop, also
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import FailFastList, described, ignored, order_properties, ranged, sampling
from foretell.server.request_model import StrictModel
from foretell.server.translation import (
    Block,
    Fields,
    GeneratingRequest,
    TranslatedRequest,
    chat_request,
    function_tool,
    json_schema_format,
    string_field,
    template_variables,
    text_of,
    tool_call,
)

# Claude Code's first line of the system prompt. Its checksum differs in each request, so no prefix would be cached.
BILLING_LINE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
BETWEEN_BLOCKS = "\n\n"  # text blocks are paragraphs of their own
NO_TEXT = ("image", "document", "search_result", "container_upload")  # blocks that a user may send elsewhere

RESULT_TYPES = "must be a string or a list of text blocks"

Content = str | Annotated[list[Block], Field(fail_fast=True)]


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class MessageParam(_Lenient):
    """A message of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra=describe_contents)

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.")
    content: Content | None = described(
        "The text, or blocks: `text`, `thinking`, `tool_use` and `tool_result`. Others are rejected in a user's "
        "message, and named by a placeholder in an assistant's message or a tool's result."
    )


class ToolParam(_Lenient):
    """A tool that the client runs, or one of Anthropic's."""

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra=describe_tool)

    name: str | None = Field(default=None, pattern=TOOL_NAME_PATTERN, description="Name of the tool.")
    type: str | None = described(
        "`custom`, or Anthropic's `bash_*`, `text_editor_*` and `memory_*`, which the client runs. Tools that run on "
        "Anthropic's servers are left out and named in the header X-Foretell-Ignored-Fields."
    )
    description: str | None = described("What it does, for the model.")
    input_schema: dict[str, Any] | None = described("JSON schema of its input.")
    strict: bool | None = described("true: a grammar enforces the schema.")

    @property
    def is_hosted(self) -> bool:
        """Return whether the tool runs on Anthropic's servers: it has no schema of its own, and no client runs it."""
        if self.type in (None, "custom") or self.input_schema is not None:
            return False
        return client_tool(self.type) is None and not needs_images(self.type)


class ToolChoiceParam(StrictModel):
    """Choice of tools: whether the model may, must or must not call one."""

    model_config = ConfigDict(json_schema_extra=also(NAMED_TOOL))
    path = "tool_choice."

    type: Literal["auto", "any", "tool", "none"] = Field(description="`any`: at least one call; `tool`: this tool.")
    name: str | None = described("With `tool`: its name.")
    disable_parallel_tool_use: bool | None = described("true: at most one call.")


class ThinkingParam(StrictModel):
    """Reasoning before the answer, of models that have it."""

    path = "thinking."

    type: str = Field(description="`enabled` and `adaptive` turn reasoning on, `disabled` turns it off.")
    budget_tokens: int | None = ranged("Most reasoning tokens.", 0)
    display: Any = ignored("The reasoning itself is returned.")


class OutputConfigParam(StrictModel):
    """Format and effort of the output."""

    path = "output_config."
    reported = frozenset(("task_budget",))

    effort: str | None = described("A variable of the chat template, if it has one.")
    format: SchemaFormat | None = described("`{type: json_schema, schema: ...}`: a grammar enforces the schema.")
    task_budget: Any = ignored("Tokens are limited by `max_tokens`.")


def _describe_request(schema: dict[str, Any]) -> None:
    order_properties(schema)
    also(FORCED_CALL)(schema)


class CountTokensRequest(TranslatedRequest):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(json_schema_extra=_describe_request)
    reported = frozenset(("container", "context_management", "fallbacks", "mcp_servers"))

    messages: FailFastList[MessageParam] = Field(
        min_length=1,
        description="The conversation so far, oldest message first.",
        examples=[[{"role": "user", "content": "Why is the sky blue?"}]],
    )
    system: str | FailFastList[SystemBlock] | None = described("The system prompt, as text or as text blocks.")
    tools: FailFastList[ToolParam] | None = described("Tools that the model may call.")
    tool_choice: ToolChoiceParam | None = described("Whether the model must call a tool.")
    thinking: ThinkingParam | None = described("Whether the model reasons first.")
    output_config: OutputConfigParam | None = described("Format and effort of the output.")
    output_format: SchemaFormat | None = described("Older name of `output_config.format`.")
    cache_control: Any = ignored("Every prefix is cached.")
    container: Any = ignored("There are no containers.")
    context_management: Any = ignored("The client manages its context.")
    diagnostics: Any = ignored("The response has timings.")
    fallback_credit_token: Any = ignored("There is no billing.")
    fallbacks: Any = ignored("One model is served.")
    inference_geo: Any = ignored("The server is where it is.")
    mcp_servers: Any = ignored("The client calls MCP servers.")
    metadata: Any = ignored("The end user's id.")
    service_tier: Any = ignored("There is one tier.")
    speed: Any = ignored("There is one speed.")
    user_profile_id: Any = ignored("The end user's id.")

    @property
    def hosted_tools(self) -> list[str]:
        """Return the tools that only Anthropic's servers run, which have no effect."""
        return [f"tools.{tool.type}" for tool in self.tools or () if tool.is_hosted]

    def to_chat(self, *, reasons: bool) -> ChatCompletionRequest:
        """Return the chat completion; `reasons`: whether the model's reasoning is parsed."""
        return chat_request(self.chat_fields(reasons))

    def chat_fields(self, reasons: bool) -> Fields:
        """Return the fields of the chat completion."""
        tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or ()) if not tool.is_hosted]
        fields: Fields = {**self.shared_fields(), "messages": self._messages(), "tools": tools or None}
        if self.tool_choice is not None:
            fields |= _tool_choice(self.tool_choice)
        self._add_thinking(fields, reasons)
        formats = {"output_format": self.output_format}
        if self.output_config is not None:
            formats["output_config.format"] = self.output_config.format
        for name, wanted in formats.items():
            if wanted is None:
                continue
            if wanted.get("type") != "json_schema" or "schema" not in wanted:
                raise RequestError(name, "must be {'type': 'json_schema', 'schema': ...}")
            fields["response_format"] = json_schema_format(wanted["schema"])
        return fields

    def _messages(self) -> list[dict[str, Any]]:
        system = without_billing_line(_texts(self.system, "system")) if self.system is not None else ""
        messages = [{"role": "system", "content": system}] if system else []
        for i, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages.{i}")
        return messages

    def _add_thinking(self, fields: Fields, reasons: bool) -> None:
        effort = None if self.output_config is None else self.output_config.effort
        on = None if self.thinking is None else self.thinking.type != "disabled"
        template_variables(fields, thinking=on, effort=effort)
        if self.thinking is not None and on and reasons:
            fields["thinking_budget"] = self.thinking.budget_tokens


class MessagesRequest(GeneratingRequest, CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int | None = Field(
        default=None,
        description="Maximum output tokens; by default the rest of the context.",
        json_schema_extra={"minimum": 1},
        examples=[64],
    )
    stop_sequences: FailFastList[Stop] | None = described("Stop strings; the output ends before the first of them.")
    stream: bool | None = described("true: send the output as server-sent events while it is generated.")
    temperature: float | None = sampling("temperature", 0)
    top_p: float | None = sampling("top_p", above=0, maximum=1)
    top_k: int | None = sampling("top_k", -1)

    def chat_fields(self, reasons: bool) -> Fields:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        own = {name: getattr(self, name) for name in names}
        return {**super().chat_fields(reasons), **own, "stop": self.stop_sequences}


def without_billing_line(system: str) -> str:
    """Return a system prompt without the billing line at its head."""
    return BILLING_LINE.sub("", system)


def _texts(content: Content, where: str) -> str:
    """Return the text of a content that may have text blocks only."""
    if isinstance(content, str):
        return content
    return BETWEEN_BLOCKS.join(text_of(block, f"{where}.{i}") for i, block in enumerate(content))


def _chat_messages(message: MessageParam, where: str) -> list[dict[str, Any]]:
    """Return the chat messages of one message: tool results become messages of their own."""
    where, content = f"{where}.content", message.content
    if content is None:
        if message.role != "assistant":
            raise RequestError(where, "must be a string or a list of blocks")
        content = ""
    if message.role == "system":
        return [{"role": "system", "content": without_billing_line(_texts(content, where))}]
    if isinstance(content, str):
        return [{"role": message.role, "content": content}]
    if message.role == "assistant":
        return [_assistant_message(content, where)]
    return _user_messages(content, where)


def _user_messages(blocks: list[Block], where: str) -> list[dict[str, Any]]:
    if not blocks:
        raise RequestError(where, "is empty; send text or blocks")
    messages: list[dict[str, Any]] = []
    texts: list[str] = []  # since the last tool result

    def flush() -> None:
        if texts:
            messages.append({"role": "user", "content": BETWEEN_BLOCKS.join(texts)})
            texts.clear()

    for i, block in enumerate(blocks):
        place = f"{where}.{i}"
        if block.get("type") != "tool_result":
            texts.append(_user_text(block, place))
            continue
        flush()
        call_id = string_field(block, "tool_use_id", place)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _result_text(block, place)})
    flush()
    return messages


def _user_text(block: Block, where: str) -> str:
    if block.get("type") in NO_TEXT:
        raise RequestError(where, f"is of type {block['type']}; this model takes text only, leave it out")
    return text_of(block, where)


def _result_text(block: Block, where: str) -> str:
    """Return the text of a tool result, which may be a string, blocks or nothing."""
    content = block.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) for part in content):
            raise RequestError(f"{where}.content", RESULT_TYPES)
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"{where}.content", RESULT_TYPES)
    text = parts_text(content, BETWEEN_BLOCKS)
    return error_text(text) if block.get("is_error") is True else text


def _assistant_message(blocks: list[Block], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        place, kind = f"{where}.{i}", block.get("type")
        if kind == "thinking":
            thoughts.append(string_field(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_earlier_call(block, place))
        elif kind == "text":
            texts.append(text_of(block, place))
        else:
            texts.append(part_text(block))
    message: dict[str, Any] = {"role": "assistant", "content": BETWEEN_BLOCKS.join(filter(None, texts))}
    if thoughts:
        message["reasoning_content"] = BETWEEN_BLOCKS.join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _earlier_call(block: Block, where: str) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, dict):
        raise RequestError(f"{where}.input", "must be an object")
    return tool_call(string_field(block, "id", where), string_field(block, "name", where), given)


def _tool(tool: ToolParam, where: str) -> dict[str, Any]:
    kind = tool.type or "custom"
    if needs_images(kind):
        raise RequestError(f"{where}.type", f"{kind} returns images, and this model takes text only; leave it out")
    name, description, schema = client_tool(kind) or (None, None, None)
    name = tool.name or name
    if name is None:
        raise RequestError(f"{where}.name", "is missing; add the name of the tool")
    return function_tool(name, tool.description or description, tool.input_schema or schema, tool.strict)


def _tool_choice(choice: ToolChoiceParam) -> Fields:
    """Return tool_choice and parallel_tool_calls of a chat completion."""
    if choice.type == "tool" and choice.name is None:
        raise RequestError("tool_choice.name", "is missing; name a tool, or use type any")
    named = {"type": "function", "function": {"name": choice.name}}
    kinds = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    return {"tool_choice": kinds[choice.type], "parallel_tool_calls": parallel}
