"""Chats as text: the model's own Jinja template, run in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from foretell.errors import ModelError, RequestError
from foretell.tokenizer.messages import plain, read_messages
from foretell.tokenizer.render_budget import TemplateLimitError, limited

if TYPE_CHECKING:
    import jinja2

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
