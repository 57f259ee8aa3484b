"""Request body of /v1/responses and its translation to a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field

from foretell.errors import RequestError
from foretell.server.json_schemas import also
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai.requests import FailFastList, described, ignored, order_properties, ranged, sampling
from foretell.server.openai_responses.input_items import Message, chat_messages
from foretell.server.openai_responses.schemas import (
    FORCED_CALL,
    SOME_INPUT,
    Format,
    Item,
    NotSet,
    ToolChoice,
    ToolItem,
)
from foretell.server.request_model import StrictModel
from foretell.server.translation import (
    Fields,
    GeneratingRequest,
    TranslatedRequest,
    chat_request,
    function_tool,
    json_schema_format,
    template_variables,
)

# Fields of features that a server without OpenAI's other services cannot have, each with an alternative.
UNSUPPORTED = {
    "background": "is not supported; send the request and wait, or stream it",
    "conversation": "is not supported; send previous_response_id, or the whole input",
    "prompt": "stored prompts are not supported; send instructions and input",
}


class ReasoningParam(StrictModel):
    """How much the model reasons before it answers, if it can."""

    path = "reasoning."

    effort: str | None = described("`none` turns reasoning off; others are a variable of the chat template.")
    summary: str | None = described("Accepted without effect: the reasoning itself is returned.")
    generate_summary: Any = ignored("Older name of summary.")
    context: Any = ignored("The chat template decides which reasoning it keeps.")
    mode: Any = ignored("There is one mode.")


class TextParam(StrictModel):
    """Format of the output."""

    path = "text."

    format: Format | None = described("`{type: text}`, `{type: json_object}`, or json_schema with a schema.")
    verbosity: str | None = described("Accepted without effect.")


def _describe_request(schema: dict[str, Any]) -> None:
    order_properties(schema)
    also(SOME_INPUT, FORCED_CALL)(schema)


class InputTokensRequest(TranslatedRequest):
    """POST /v1/responses/input_tokens."""

    model_config = ConfigDict(json_schema_extra=_describe_request)
    reported = frozenset(("personality",))

    input: str | FailFastList[Item] | None = Field(
        default=None,
        description="The user's text, or items: messages, function calls, their outputs, reasoning.",
        examples=["Why is the sky blue?"],
    )
    instructions: str | None = described("The system prompt; not taken over from the previous response.")
    previous_response_id: str | None = described("A stored response that the input continues.")
    tools: FailFastList[ToolItem] | None = described(
        "Functions that the model may call. Others are left out and named in the header X-Foretell-Ignored-Fields."
    )
    tool_choice: ToolChoice | None = described("`auto`, `none`, `required`, a function or allowed_tools.")
    parallel_tool_calls: bool | None = described("false: at most one call.")
    text: TextParam | None = described("Format of the output.")
    reasoning: ReasoningParam | None = described("How much the model reasons first.")
    conversation: NotSet = described("Only null: send previous_response_id, or the whole input.")
    personality: Any = ignored("Send instructions.")
    truncation: Any = ignored("Prompts are never truncated; one that is too long is refused.")

    def to_chat(self, earlier: Sequence[Message]) -> ChatCompletionRequest:
        """Return the chat completion that continues the `earlier` messages."""
        self.check_unsupported()
        return chat_request(self.chat_fields(earlier))

    def chat_fields(self, earlier: Sequence[Message]) -> Fields:
        """Return the fields of the chat completion."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = [*system, *earlier, *self.new_messages()]
        if not messages:
            raise RequestError("input", "is missing; send text or items")
        fields: Fields = {**self.shared_fields(), "messages": messages, **self._tool_fields()}
        fields |= {"parallel_tool_calls": self.parallel_tool_calls, "response_format": self._response_format()}
        effort = None if self.reasoning is None else self.reasoning.effort
        thinking = None if effort is None else effort != "none"
        template_variables(fields, thinking=thinking, effort=effort)
        return fields

    def check_unsupported(self) -> None:
        """Reject the fields that are not supported."""
        for name, reason in UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value is not None and value is not False:
                raise RequestError(name, reason)

    def new_messages(self) -> list[Message]:
        """Return the chat messages of the input alone."""
        if self.input is None:
            return []
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return chat_messages(self.input)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Return the tools that are functions."""
        return [tool for tool in self.tools or () if tool.get("type") == "function"]

    @property
    def hosted_tools(self) -> list[str]:
        """Return the names of tools that only OpenAI's servers can run."""
        return [f"tools.{tool.get('type')}" for tool in self.tools or () if tool.get("type") != "function"]

    def _tool_fields(self) -> Fields:
        tools = [_chat_tool(tool, f"tools.{i}") for i, tool in enumerate(self.functions)]
        choice, allowed = _tool_choice(self.tool_choice)
        if allowed is not None:
            tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        if not tools and choice in (None, "auto", "none"):
            return {}
        return {"tools": tools or None, "tool_choice": choice}

    def _response_format(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        match None if wanted is None else wanted.get("type"):
            case None | "text":
                return None
            case "json_object":
                return {"type": "json_object"}
            case "json_schema" if wanted is not None and "schema" in wanted:
                return json_schema_format(wanted["schema"])
        raise RequestError("text.format", "must have type text, json_object, or json_schema with a schema")


class ResponsesRequest(GeneratingRequest, InputTokensRequest):
    """POST /v1/responses."""

    reported = frozenset(("context_management", "include", "max_tool_calls", "moderation", "personality"))

    store: bool | None = described("false: do not store the response. Stored ones can be continued and read.")
    stream: bool | None = described("true: send the output as server-sent events while it is generated.")
    max_output_tokens: int | None = Field(
        default=None,
        description="Maximum output tokens, reasoning included; by default the rest of the context.",
        json_schema_extra={"minimum": 1},
        examples=[64],
    )
    temperature: float | None = sampling("temperature", 0)
    top_p: float | None = sampling("top_p", above=0, maximum=1)
    top_logprobs: int | None = ranged("Only 0: /v1/chat/completions returns logprobs.", 0, 0)
    metadata: dict[str, Any] | None = described("Returned with the response; it has no other effect.")
    user: str | None = described("Returned with the response; it has no other effect.")
    background: NotSet = described("Only false: wait for the response, or stream it.")
    prompt: NotSet = described("Only null: send instructions and input.")
    access_programs: Any = ignored("There are no such programs.")
    client_metadata: Any = ignored("Labels of the client.")
    context_management: Any = ignored("The client manages its context.")
    include: Any = ignored("Responses have what there is.")
    max_tool_calls: Any = ignored("The client runs all tools.")
    moderation: Any = ignored("Nothing is moderated.")
    prompt_cache_key: Any = ignored("Prefixes are cached by their tokens; see cache_salt.")
    prompt_cache_options: Any = ignored("Every prefix is cached.")
    prompt_cache_retention: Any = ignored("The least recently used prefixes are evicted.")
    safety_identifier: Any = ignored("The end user's id.")
    service_tier: Any = ignored("There is one tier.")
    stream_options: Any = ignored("Streams have no obfuscation.")

    def chat_fields(self, earlier: Sequence[Message]) -> Fields:
        own = {name: getattr(self, name) for name in ("stream", "temperature", "top_p")}
        return {**super().chat_fields(earlier), **own, "max_tokens": self.max_output_tokens}

    def check_unsupported(self) -> None:
        super().check_unsupported()
        if self.top_logprobs:
            raise RequestError("top_logprobs", "is not supported here; use /v1/chat/completions")


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a function as a chat completion's tool. Most clients mark all of them as strict without need."""
    name, description = tool.get("name"), tool.get("description")
    if not isinstance(name, str):
        raise RequestError(f"{where}.name", "must be a string")
    return function_tool(name, description, tool.get("parameters"), tool.get("strict"))


def _tool_choice(choice: str | dict[str, Any] | None) -> tuple[Any, list[str] | None]:
    """Return a chat completion's tool_choice, and the names of the tools if it allows only some of them."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice, None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        names = [tool.get("name") for tool in choice["tools"] if isinstance(tool, dict)]
        return choice.get("mode", "auto"), [name for name in names if isinstance(name, str)]
    raise RequestError("tool_choice", "must be auto, none, required, a function, or allowed_tools")
