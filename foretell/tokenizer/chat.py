"""Chats as text: the model's own Jinja template, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from foretell.errors import RequestError
from foretell.tokenizer.messages import plain, read_messages

if TYPE_CHECKING:
    import jinja2
    from jinja2.ext import Extension

# More turns of loops and macros than any chat needs; a template that takes more does not end in useful time.
MAX_STEPS = 1_000_000
STEP = "_foretell_step"
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
        template = self.template(TOOLS if tools and TOOLS in self.sources else "default")
        context = {"documents": None, **self.named, **plain(values)}
        context |= {"messages": read_messages(messages), "tools": plain(tools), STEP: step_counter()}
        # A template is foreign code: what it raises, of whatever type, says that it cannot write these messages.
        try:
            return template.render(context)
        except Exception as problem:
            raise RequestError(
                "messages", f"the model's chat template does not take them: {said(problem)}"
            ) from problem

    def template(self, name: str) -> jinja2.Template:
        """The template of that name, ready to run."""
        if name not in self.sources:
            raise RequestError("messages", "this model has no chat template; send the text as a raw prompt instead")
        if name not in self.compiled:
            self.compiled[name] = compile_template(self.sources[name])
        return self.compiled[name]


def compile_template(source: str) -> jinja2.Template:
    """The template with the filters and functions that model makers count on, and with its steps counted."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", generation_blocks()]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        tree = environment.parse(source)
        loops: list[jinja2.nodes.For | jinja2.nodes.Macro] = [*tree.find_all(jinja2.nodes.For)]
        loops += tree.find_all(jinja2.nodes.Macro)
        for node in loops:
            step = jinja2.nodes.Call(jinja2.nodes.Name(STEP, "load"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        return environment.from_string(tree)
    except jinja2.TemplateError as problem:
        message = f"the model's chat template is broken ({said(problem)}); send the text as a raw prompt instead"
        raise RequestError("messages", message) from problem


def generation_blocks() -> type[Extension]:
    """{% generation %} marks what a model is trained on; for writing a prompt it is only its content."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlocks(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationBlocks


def step_counter() -> Callable[[], None]:
    """A function that refuses to be called more than MAX_STEPS times."""
    left = MAX_STEPS

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OverflowError(f"it takes more than {MAX_STEPS} steps")

    return step


def said(problem: Exception) -> str:
    """The first line of an error, or its name if it says nothing."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def raise_exception(message: str) -> NoReturn:
    """For templates that refuse a chat."""
    import jinja2

    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    """For templates that tell the model the date."""
    return datetime.now().strftime(pattern)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands in training data, without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
