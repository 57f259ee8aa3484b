"""Hostile chat templates: each is an error of its request, in bounded time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import ModelError, RequestError
from foretell.tokenizer import render_budget
from foretell.tokenizer.chat import ChatTemplates
from tests.attack.template_bombs import BOMBS

REPO = Path(__file__).parents[2]
HELLO = [{"role": "user", "content": "hello"}]
# With fewer steps and seconds than usual the limits are met sooner; the memory is what a template may take at most.
CHILD = """
import json, resource, sys
from foretell.errors import RequestError
from foretell.tokenizer import render_budget
from foretell.tokenizer.chat import ChatTemplates
from tests.attack.template_bombs import BOMBS

render_budget.MAX_STEPS, render_budget.MAX_SECONDS = 50_000, 0.1
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (400 << 20),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (90, 90))
for name, template in BOMBS.items():
    try:
        ChatTemplates({"default": template}, {}).render([{"role": "user", "content": "hello"}], None, {})
        found = "rendered"
    except RequestError as error:
        cause = type(error.__cause__).__name__
        found = "MemoryError" if cause == "MemoryError" else str(error)
    print(json.dumps([name, found]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each template, in a process of its own that may use little memory and time."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_an_error_of_its_request(outcomes: dict[str, str], name: str) -> None:
    assert name in outcomes, "the process died or hung before this template was done"
    assert outcomes[name].startswith("messages: the model's chat template ")
    assert "\n" not in outcomes[name] and len(outcomes[name]) < 500


def render(template: str, messages: Any = HELLO, **values: Any) -> str:
    return ChatTemplates({"default": template}, {}).render(messages, None, values)


def test_the_limit_is_cpu_time_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(render_budget.time, "perf_counter", lambda: clocks["wall"])
    monkeypatch.setattr(render_budget.time, "thread_time", lambda: clocks["cpu"])
    with render_budget.limited({}) as budget:
        clocks["wall"] = 1000.0  # the machine was busy with others
        budget.tick()
        clocks["cpu"] = render_budget.MAX_SECONDS / 2
        clocks["wall"] = 2000.0
        budget.tick()
        clocks["cpu"] = render_budget.MAX_SECONDS + 1
        clocks["wall"] = 3000.0
        with pytest.raises(render_budget.TemplateLimitError, match="more than 5 s"):
            budget.tick()


def test_a_budget_ends_with_its_rendering() -> None:
    assert render("{{ 'a' * 3 }}") == "aaa"
    with pytest.raises(RequestError):
        render("{{ 'a' * 10**9 }}")
    assert not render_budget.rendering()
    assert render("{{ 'a' * 3 }}") == "aaa"


def test_limits_grow_with_the_input() -> None:
    template = "{{ messages[0].content + messages[0].content }}"
    size = render_budget.VALUE_BYTES
    assert len(render(template, [{"role": "user", "content": "x" * size}])) == 2 * size
    with pytest.raises(RequestError, match="too large"):
        render("{{ ('x' * half) + ('x' * half) }}", half=size // 2 + 10_000)


ACCUMULATING = """{% set ns = namespace(t='') %}{% for m in messages %}
{%- set ns.t = ns.t ~ '<' ~ m.role ~ '>' ~ m.content %}{% endfor %}{{ ns.t }}"""


def test_a_long_chat_with_a_template_that_accumulates_is_rendered() -> None:
    chat = [{"role": "user", "content": "x" * 400}] * 1000
    assert len(render(ACCUMULATING, chat)) == 406 * 1000


def test_the_limit_of_all_values_is_named() -> None:
    with pytest.raises(RequestError, match="makes more than 268.* bytes of values; use a shorter chat, or a template"):
        render("{% for i in range(100) %}{{ 'x' * 10**7 }}{% endfor %}")


def test_formats_with_percent_signs_are_accepted() -> None:
    assert render("{{ '%(a)s (b) 12345 %% %(c(d))05.1f' % {'a': 1, 'c(d)': 2} }}") == "1 (b) 12345 % 002.0"
    assert render("{{ '%s%%5000d %ld' % (1, 2) }}") == "1%5000d 2"


def test_words_are_counted_and_capitalized() -> None:
    assert render("{{ 'two words'|title }} {{ 'two words'|wordcount }} {{ 5|title }}") == "Two Words 2 5"


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("depth", [65, 900, 100_000])
def test_deep_values_are_refused_by_their_field(depth: int) -> None:
    with pytest.raises(RequestError, match="nested too deep") as caught:
        render("{{ x }}", x=nested(depth))
    assert caught.value.field == "chat_template_kwargs"
    with pytest.raises(RequestError, match="nested too deep") as caught:
        render("x", [{"role": "user", "content": "x", "extra": nested(depth)}])
    assert caught.value.field == "messages"
    with pytest.raises(RequestError, match="nested too deep") as caught:
        ChatTemplates({"default": "x"}, {}).render(HELLO, [nested(depth)], {})
    assert caught.value.field == "tools"


def test_values_as_deep_as_schemas_are_rendered() -> None:
    assert json.loads(render("{{ x | tojson }}", x=nested(60))) == nested(60)


def test_a_value_that_contains_itself_is_refused() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(RequestError, match="nested too deep"):
        render("{{ x }}", x=cyclic)


def test_a_model_is_refused_whose_template_exceeds_the_limits() -> None:
    with pytest.raises(ModelError, match="the chat template 'default' is refused: an integer has more than"):
        ChatTemplates({"default": "{{ 9**(9**9) }}"}, {}).check()
    with pytest.raises(ModelError, match="the chat template 'tool_use' is refused"):
        ChatTemplates({"default": "x", "tool_use": "{{ 'a' * 10**10 }}"}, {}).check()


@pytest.mark.parametrize("template", ["x", "{% if %}", "{{ raise_exception('no') }}", "{{ messages[5].x }}"])
def test_other_templates_are_left_to_requests(template: str) -> None:
    ChatTemplates({"default": template}, {}).check()
