"""Chat templates: messages are validated and rendered by the model's Jinja template in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from foretell.errors import ModelError, RequestError
from foretell.tokenizer.render_budget import TemplateLimitError, limited
from foretell.tokenizer.turn_rules import PROBE_TOOL, TurnRules, probe_turns

if TYPE_CHECKING:
    import jinja2

MAX_DEPTH = 64  # nesting levels of a request's values; a template may add its own
REASONING = ("reasoning_content", "thinking", "reasoning")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Validate messages and return them as JSON types, with reasoning under every name that templates use."""
    if isinstance(messages, Mapping):
        raise RequestError("messages", "must be a list of messages; put this one into a list")
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", "must be a list of one or more messages, each with a role and a content")
    return [with_reasoning(to_json_types(check_message(message, index))) for index, message in enumerate(messages)]


def check_message(message: Any, index: int) -> Mapping[str, Any]:
    """Validate a message: it needs a role, and a content that is text."""
    if not isinstance(message, Mapping):
        raise RequestError("messages", f"message {index} must be an object with a role and a content")
    if not isinstance(message.get("role"), str):
        raise RequestError("messages", f"message {index} needs a role that is a string, such as 'user'")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return message
    return {**message, "content": as_text(content, index)}


def as_text(content: Any, index: int) -> str:
    """Return a content given as a string or as a list of text parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(part_text(part, index, place) for place, part in enumerate(content))
    found = "none" if content is None else type(content).__name__
    raise RequestError(
        "messages", f"message {index} needs a content that is a string or a list of text parts, not {found}"
    )


def part_text(part: Any, index: int, place: int) -> str:
    """Return the text of one part; other types are not supported."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind != "text":
        raise RequestError(
            f"messages.{index}.content.{place}", f"is of type {kind!r}; this model takes text only, leave it out"
        )
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError("messages", f"message {index} has a part that is not {{'type': 'text', 'text': ...}}")
    return str(part["text"])


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy a message's reasoning to the names that different templates use for it."""
    given = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}


def to_json_types(value: Any, field: str = "messages", depth: int = 0) -> Any:
    """Convert a value to JSON types, so that a template cannot call methods of our objects.

    Values nested deeper than MAX_DEPTH, including recursive ones, are refused under the name of `field`.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if depth >= MAX_DEPTH:
        raise RequestError(field, f"is nested too deep; at most {MAX_DEPTH} levels of lists and objects are allowed")
    if isinstance(value, Mapping):
        return {str(key): to_json_types(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json_types(item, field, depth + 1) for item in value]
    return f"<{type(value).__name__}>"


MAX_MESSAGE = 300  # characters of an error message or a date format
TOOLS = "tool_use"  # the usual name of a separate template for chats with tools


class ChatTemplates:
    """The chat templates of a model by name, compiled on first use."""

    def __init__(self, sources: Mapping[str, str], named: Mapping[str, str]) -> None:
        self.sources = sources
        self.named = named
        self.compiled: dict[str, jinja2.Template] = {}
        self._rules: dict[bool, TurnRules] = {}  # by whether a chat has tools

    @property
    def default(self) -> str | None:
        """Return the template used without tools."""
        return self.sources.get("default")

    @property
    def with_tools(self) -> str | None:
        """Return the template used with tools."""
        return self.sources.get(TOOLS, self.default)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> str:
        """Apply the chat template; any error of the template is a RequestError about the messages."""
        return self.render_with(TOOLS if tools and TOOLS in self.sources else "default", messages, tools, values)

    def render_with(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> str:
        """Apply the template of that name."""
        template = self.template(name)
        context = {"documents": None, **self.named, **to_json_types(values, "chat_template_kwargs")}
        context |= {"messages": read_messages(messages), "tools": to_json_types(tools, "tools")}
        # A template is foreign code: an exception of any type means that it rejects these messages.
        try:
            with limited(context):
                return template.render(context)
        except Exception as problem:
            raise RequestError(
                "messages", f"the model's chat template rejects them: {first_line(problem)}"
            ) from problem

    def turn_rules(self, *, with_tools: bool) -> TurnRules:
        """Return which turns the template takes; it is probed once."""
        if with_tools not in self._rules:
            tools = [PROBE_TOOL] if with_tools else None
            values = {"add_generation_prompt": True}
            self._rules[with_tools] = probe_turns(lambda turns: self.render(turns, tools, values))
        return self._rules[with_tools]

    def check(self) -> None:
        """Refuse a model whose template exceeds the limits of the sandbox in a one-word chat.

        Other errors are left to the requests: a template may reject a chat, and a raw prompt needs none.
        """
        for name in self.sources:
            try:
                self.render_with(name, [{"role": "user", "content": "hello"}], None, {"add_generation_prompt": True})
            except RequestError as problem:
                if isinstance(problem.__cause__, TemplateLimitError):
                    raise ModelError(f"the chat template {name!r} is refused: {problem.__cause__}") from problem

    def template(self, name: str) -> jinja2.Template:
        """Return the compiled template of that name."""
        if name not in self.sources:
            raise RequestError("messages", "this model has no chat template; send the text as a raw prompt instead")
        if name not in self.compiled:
            self.compiled[name] = compile_template(self.sources[name])
        return self.compiled[name]


def compile_template(source: str) -> jinja2.Template:
    """Compile a template with the filters and functions that models rely on."""
    from foretell.tokenizer.sandbox import BoundedEnvironment

    environment = BoundedEnvironment()
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    # Jinja, and Python's compiler after it, raise errors of many kinds at source that is wrong or nested too deep.
    try:
        return environment.compiled(source)
    except Exception as problem:
        message = f"the model's chat template is broken ({first_line(problem)}); send the text as a raw prompt instead"
        raise RequestError("messages", message) from problem


def first_line(problem: Exception) -> str:
    """Return the first line of an error, or its name if it has no message."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:MAX_MESSAGE]


def raise_exception(message: str) -> NoReturn:
    """Raise an error; templates call this to reject a chat."""
    import jinja2

    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    """Format the current date; templates call this to tell the model the date."""
    if len(pattern) > MAX_MESSAGE:
        raise ValueError(f"a date format has at most {MAX_MESSAGE} characters, not {len(pattern)}")
    return datetime.now().strftime(pattern)
