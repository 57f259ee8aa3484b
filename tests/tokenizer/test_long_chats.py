"""Long conversations stay within the limits of the template sandbox, and it changes no character."""

# ruff: noqa: E501
from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foretell.tokenizer.chat import ChatTemplates, raise_exception, strftime_now
from tests.tokenizer.chat_templates import TEMPLATES

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
DOCUMENT = ("A line of a long document, with ünïcödé and 'quotes'.\n" * 4000)[:200_000]


def to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def unbounded(template: str, messages: Any, tools: Any) -> str:
    """Render as transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    values = {"messages": messages, "tools": tools, "add_generation_prompt": True, **NAMED}
    return environment.from_string(template).render(values)


def turns(count: int, content: str) -> list[dict[str, Any]]:
    answers = ["<think>\nhm\n</think>\n\n" + content, content]
    return [
        {"role": "assistant", "content": answers[turn // 2 % 2]} if turn % 2 else {"role": "user", "content": content}
        for turn in range(count)
    ]


def called(count: int) -> list[dict[str, Any]]:
    """A conversation in which each second answer calls a tool."""
    messages: list[dict[str, Any]] = []
    for turn in range(count // 4):
        call = {"type": "function", "id": str(turn), "function": {"name": "f", "arguments": {"x": [turn, "é"]}}}
        messages += [
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "result " * 50},
            {"role": "assistant", "content": f"answer {turn}"},
        ]
    return messages


def schema(depth: int) -> dict[str, Any]:
    inner = schema(depth - 1) if depth else {"type": ["string", "null"], "enum": ["a", "b"], "description": "x" * 100}
    properties = {"first": inner, "second": {"type": "array", "items": {"type": "string"}}, "third": inner}
    return {"type": "object", "properties": properties, "required": ["first"]}


def tool(number: int) -> dict[str, Any]:
    function = {"name": f"tool_{number}", "description": "Does\nthis. " * 30, "parameters": schema(4)}
    return {"type": "function", "function": function}


CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "500 messages": (turns(501, "word " * 80), None),
    "50 tools": (turns(3, "hi"), [tool(number) for number in range(50)]),
    "a long document": ([{"role": "system", "content": DOCUMENT}, *turns(3, DOCUMENT)], None),
    "calls": (called(500), [tool(number) for number in range(5)]),
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_long_chats_are_rendered_as_without_limits(name: str, chat: str) -> None:
    messages, tools = CHATS[chat]
    if name == "alternating" and tools:
        pytest.skip("it has no tools")
    rendered = ChatTemplates({"default": TEMPLATES[name]}, NAMED).render(
        messages, tools, {"add_generation_prompt": True}
    )
    assert rendered == unbounded(TEMPLATES[name], messages, tools)
    assert len(rendered) > 1000


FEATURES = [
    "{{ [3, 1, 2] | sort(reverse=true) | join('-') }}{{ 'a-b'.split('-') | last }}{{ [1, 2, 3] | sum }}{{ 7 // 2 }}",
    "{{ '%s is %05.2f' % ('x', 3.14159) }}{{ '{:>8}|{a!r}'.format('b', a=[1]) }}{{ '%d' | format(3) }}",
    "{{ 'a\nb\n\nc' | indent(4, first=true) }}{{ 'x' | center(9) }}{{ 'abc' | list }}{{ 'AbC' | lower | title }}",
    "{{ [1, 2, 3, 4, 5] | batch(2, 'x') | list }}{{ [1, 2, 3, 4, 5] | slice(2) | map('list') | list }}",
    "{{ {'b': 1, 'a': [1, {'c': none}]} | dictsort }}{{ {'a': 1} | items | list }}{{ dict(a=1).items() | list }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | groupby('role') | length }}",
    "{{ 2 ** 10 }}{{ 10 ** -2 }}{{ -3 % 5 }}{{ 1.5 * 2 }}{{ 'ab' * 3 }}{{ [0] * 3 }}{{ 3 * 'x' }}{{ 5 | round(1) }}",
    "{{ '42' | int + 1 }}{{ 'x' | int(7) }}{{ '2.5' | float }}{{ 3.7 | int }}{{ 'ff' | int(base=16) }}{{ -3 | abs }}",
    "{{ 'a' ~ 1 ~ none ~ [1] }}{{ 'abcdef'[1:4] }}{{ 'abc'[::-1] }}{{ (1, 2) + (3,) }}{{ [1, 2][0] }}{{ [1] == [1] }}",
    "{{ '<b>' | e }}{{ '<b>' | safe }}{{ ('<b>' | safe) + '<' }}{{ 'a b' | urlencode }}{{ 'a b c' | wordcount }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(', ') %}{{ j() }}x{{ j() }}y",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() }}{% endmacro %}"
    "{% call m(1, 3, 4, c=5) %}inner{% endcall %}{% filter upper %}abc{{ 1 }}{% endfilter %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}{{ messages | tojson }}",
    "{% for k, v in {'a': 1}.items() if v %}{{ k }}{{ v }}{{ loop.previtem }}{% else %}none{% endfor %}{{ missing }}",
    "{{ ' a '.strip() }}{{ 'a,b'.replace(',', ';') }}{{ ', '.join(['a', 'b']) }}{{ 'a\nb'.splitlines() }}{{ 'b'.zfill(3) }}",
    "{{ 'abc'.rfind('c') }}{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a-b-c'.rpartition('-') }}{{ 'xax'.strip('x') }}{{ ' a' | trim }}",
    "{% block b %}in{% endblock %}{{ self.b() }}{% with a=1, b=2 %}{{ a + b }}{% endwith %}{{ [1, 2, 2] | unique | list }}",
    "{{ ([1, 2] | first, [1, 2] | max, [] | length, '' | default('d', true)) }}{{ 'x' is in ['x'] }}{{ 3 is divisibleby 3 }}",
]


@pytest.mark.parametrize("template", FEATURES)
def test_filters_and_operators_give_what_jinja_gives(template: str) -> None:
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "<x>"}]
    assert ChatTemplates({"default": template}, NAMED).render(
        messages, None, {"add_generation_prompt": True}
    ) == unbounded(template, messages, None)
