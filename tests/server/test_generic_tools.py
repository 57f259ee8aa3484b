"""Tools of models whose chat template knows none, and histories with calls that are cut, empty or in parts."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.errors import RequestError
from foretell.hub.catalog import BUILTINS
from foretell.server.chat_template import apply_chat_template, call_arguments
from foretell.server.config import ServerConfig
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.preprocess import ClientContext, GenerationJob, RequestPreprocessor
from foretell.server.service import Service
from foretell.tokenizer.chat import ChatTemplates
from tests.server.in_process import run_app

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "no system role": ALTERNATING, "gemma": BUILTINS["gemma3-270m"].chat_template or ""}
HELLO = [{"role": "user", "content": "Weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It", "parameters": PARAMETERS}}]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
ANSWERED = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "b"}]},
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]},
]


@pytest.fixture(params=TEMPLATES)
def untaught(request: pytest.FixtureRequest, assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> Assembly:
    """Give the tiny model a template that knows no tools."""
    own = ChatTemplates({"default": TEMPLATES[request.param]}, {"bos_token": ""})
    monkeypatch.setattr(assembly.tokenizer, "_templates", own)
    return assembly


def prompt_of(assembly: Assembly, messages: list[Any], **more: Any) -> str:
    body = ChatCompletionRequest.model_validate({"messages": messages, **more})
    return apply_chat_template(assembly.tokenizer, body, body.tools)


def job(assembly: Assembly, **more: Any) -> GenerationJob:
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "tools": TOOLS, **more})
    return RequestPreprocessor(assembly, ServerConfig()).preprocess_chat(body, ClientContext("a", ""))


def test_tools_are_described_where_the_template_knows_none(untaught: Assembly) -> None:
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    for messages in (HELLO, system, ANSWERED):
        text = prompt_of(untaught, messages, tools=TOOLS)
        assert '"name": "weather"' in text and "<tool_call>\n{" in text
        assert text.index("</tools>") < text.index("Weather in Oslo?")
    assert prompt_of(untaught, system, tools=TOOLS).index("Be brief.") < text.index("Weather")
    assert "weather" not in prompt_of(untaught, HELLO)
    (notice,) = RequestPreprocessor(untaught, ServerConfig()).notices()
    assert "--tool-call-parser none" in notice


def test_calls_and_results_are_history_with_tools_and_without(untaught: Assembly) -> None:
    for more in ({}, {"tools": TOOLS}):
        text = prompt_of(untaught, ANSWERED, **more)
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        assert f"{call}\n{call}" in text
        assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsunny\n</tool_response>" in text


def test_a_forced_call_is_one_and_is_read_by_the_same_parser(untaught: Assembly) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    one = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    for choice in (named, "required"):
        forced = job(untaught, tool_choice=choice)
        assert forced.tool_parser == "hermes" and forced.grammar is not None
        for text, parallel in ((one, None), (f"{one}\n{one}", True)):
            grammar = job(untaught, tool_choice=choice, parallel_tool_calls=parallel).grammar
            assert grammar is not None
            tokens = untaught.tokenizer.encode(text, add_special=False)
            matcher = untaught.grammars.compile(grammar).matcher(())
            assert matcher.count_allowed(tokens) == len(tokens)
        two = untaught.tokenizer.encode(f"{one}\n{one}", add_special=False)
        assert untaught.grammars.compile(forced.grammar).matcher(()).count_allowed(two) < len(two)


def test_none_turns_tools_off(untaught: Assembly) -> None:
    preprocessor = RequestPreprocessor(untaught, ServerConfig(tool_call_parser="none"))
    assert preprocessor.tool_parser is None and not list(preprocessor.notices())
    body = ChatCompletionRequest.model_validate({"messages": HELLO, "tools": TOOLS})
    with pytest.raises(RequestError, match="--tool-call-parser"):
        preprocessor.preprocess_chat(body, ClientContext("a", ""))


def test_a_forced_call_without_a_limit_ends_the_turn(untaught: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
        answers = [
            (await client.post("/v1/chat/completions", json={**body, "seed": 3, "speculative": on})).json()
            for on in (True, False)
        ]
        choice = answers[0]["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and answers[0]["usage"]["completion_tokens"] < 200
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
        same = answers[1]["choices"][0]["message"]["tool_calls"][0]["function"]
        assert same == call["function"], "speculation does not change the call"
        history = [*HELLO, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
        again = await client.post("/v1/chat/completions", json={"messages": history, "tools": TOOLS, "max_tokens": 2})
        assert again.status_code == 200, again.text

    run_app(untaught, play)


CUT: dict[str, dict[str, Any]] = {
    '{"city": "Os': {"city": "Os"},
    '{"city": "Oslo", "da': {"city": "Oslo"},
    '{"city": "Oslo", "days": [1, 2, {"a": ': {"city": "Oslo", "days": [1, 2, {}]},
    '{"city": "Oslo", "b": "a \\': {"city": "Oslo"},
    '{"n": -': {},
    "{": {},
    "": {},
    '{"a": 1}': {"a": 1},
    "[1, 2]": {"arguments": "[1, 2]"},
    "nonsense": {"arguments": "nonsense"},
    '{"a": 1} 2': {"arguments": '{"a": 1} 2'},
    '{"a": ' * 100: {"arguments": '{"a": ' * 100},
}


@pytest.mark.parametrize("text", CUT)
def test_arguments_that_were_cut_are_accepted_as_history(assembly: Assembly, text: str) -> None:
    found = call_arguments(text or "{}")
    assert found == CUT[text]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": text}}]},
        {"role": "tool", "content": None},
        {"role": "assistant", "content": None},
        *HELLO,
    ]
    assert json.dumps(found) in prompt_of(assembly, messages, tools=TOOLS)


def test_a_generic_history_shows_the_raw_arguments(untaught: Assembly) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Os'}}
    text = prompt_of(untaught, [*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO])
    assert '{"name": "weather", "arguments": {"city": "Os}' in text


def test_content_that_would_be_lost_is_refused(untaught: Assembly) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(RequestError, match="image_url"):
        prompt_of(untaught, [{"role": "user", "content": image}])
    assert "[image_url omitted]" in prompt_of(untaught, [*ANSWERED[:2], {"role": "tool", "content": image}])
    with pytest.raises(RequestError, match="content"):
        prompt_of(untaught, [{"role": "user", "content": None}])


def test_a_chat_without_a_limit_is_streamed_or_bounded(assembly: Assembly) -> None:
    preprocessor = RequestPreprocessor(assembly, ServerConfig(unstreamed_max_tokens=8))

    def limit(**fields: Any) -> int:
        body = ChatCompletionRequest.model_validate({"messages": HELLO, **fields})
        request = preprocessor.preprocess_chat(body, ClientContext("a", "")).requests[0]
        return request.max_tokens - (preprocessor.max_model_len - len(request.prompt))

    prompt = preprocessor.tokenizer.encode(prompt_of(assembly, HELLO), add_special=False)
    rest = preprocessor.max_model_len - len(prompt)
    assert limit(stream=True) == 0, "the rest of the context"
    assert limit() == 8 - rest and limit(max_tokens=20) == 20 - rest and limit(max_tokens=100_000) == 0
    with pytest.raises(RequestError, match="maximum|more than"):
        RequestPreprocessor(assembly, ServerConfig(strict_max_tokens=True)).preprocess_chat(
            ChatCompletionRequest.model_validate({"messages": HELLO, "max_tokens": 100_000}), ClientContext("a", "")
        )
