"""Chats as text: the model's own Jinja template, run in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from foretell.errors import ModelError, RequestError
from foretell.tokenizer.render_budget import TemplateLimitError, limited

if TYPE_CHECKING:
    import jinja2

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


MAX_MESSAGE = 300  # characters of an error, and of a date format
TOOLS = "tool_use"  # the name model makers give a template of its own for chats with tools


class ChatTemplates:
    """The templates of a model by name, compiled when first used."""

    def __init__(self, sources: Mapping[str, str], named: Mapping[str, str]) -> None:
        self.sources = sources
        self.named = named
        self.compiled: dict[str, jinja2.Template] = {}

    @property
    def default(self) -> str | None:
        """The template used without tools."""
        return self.sources.get("default")

    @property
    def with_tools(self) -> str | None:
        """The template used with tools."""
        return self.sources.get(TOOLS, self.default)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> str:
        """The chat as text; whatever a template refuses is a RequestError about the messages."""
        return self.render_with(TOOLS if tools and TOOLS in self.sources else "default", messages, tools, values)

    def render_with(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
    ) -> str:
        """Return the chat as the template of that name has it."""
        template = self.template(name)
        context = {"documents": None, **self.named, **plain(values, "chat_template_kwargs")}
        context |= {"messages": read_messages(messages), "tools": plain(tools, "tools")}
        # A template is foreign code: what it raises, of whatever type, says that it cannot write these messages.
        try:
            with limited(context):
                return template.render(context)
        except Exception as problem:
            raise RequestError(
                "messages", f"the model's chat template does not take them: {said(problem)}"
            ) from problem

    def check(self) -> None:
        """Refuse a model whose template exceeds the limits of the sandbox in a chat of one word.

        Other errors are left to the requests: a template may refuse a chat, and a raw prompt needs none.
        """
        for name in self.sources:
            try:
                self.render_with(name, [{"role": "user", "content": "hello"}], None, {"add_generation_prompt": True})
            except RequestError as problem:
                if isinstance(problem.__cause__, TemplateLimitError):
                    raise ModelError(f"the chat template {name!r} is not run: {problem.__cause__}") from problem

    def template(self, name: str) -> jinja2.Template:
        """The template of that name, ready to run."""
        if name not in self.sources:
            raise RequestError("messages", "this model has no chat template; send the text as a raw prompt instead")
        if name not in self.compiled:
            self.compiled[name] = compile_template(self.sources[name])
        return self.compiled[name]


def compile_template(source: str) -> jinja2.Template:
    """Return the template with the filters and functions that model makers rely on."""
    from foretell.tokenizer.sandbox import BoundedEnvironment

    environment = BoundedEnvironment()
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    # Jinja, and Python's compiler after it, raise errors of many kinds at source that is wrong or nested too deep.
    try:
        return environment.compiled(source)
    except Exception as problem:
        message = f"the model's chat template is broken ({said(problem)}); send the text as a raw prompt instead"
        raise RequestError("messages", message) from problem


def said(problem: Exception) -> str:
    """Return the first line of an error, or its name if it has no message."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:MAX_MESSAGE]


def raise_exception(message: str) -> NoReturn:
    """For templates that refuse a chat."""
    import jinja2

    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    """For templates that tell the model the date."""
    if len(pattern) > MAX_MESSAGE:
        raise ValueError(f"a date format has at most {MAX_MESSAGE} characters, not {len(pattern)}")
    return datetime.now().strftime(pattern)
