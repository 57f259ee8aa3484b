"""Bodies that were made to hurt: refused in few words, by the right name, and soon."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from foretell.build import Assembly
from foretell.params import SamplingParams
from foretell.server.halves import half_at
from foretell.server.protocol import MOST_LISTED, CompletionBody, Speculative, StructuredOutputs
from foretell.server.protocol_chat import ChatBody, DetokenizeBody, Message, TokenizeBody
from foretell.server.service import Service
from foretell.types import SpeculationChoice
from tests.server.process import CONTEXT
from tests.server.scene import go

MANY = 5000
HELLO = [{"role": "user", "content": "Hello"}]
BAD: list[Any] = [
    [None] * MANY,
    [[None]] * MANY,
    [{"role": 3}] * MANY,
    {str(i): None for i in range(MANY)},
    [{"role": "user", "content": [None] * MANY}] * MANY,
    [{"role": "assistant", "tool_calls": [None] * MANY}] * MANY,
    [{"type": "function", "function": {str(i): 1 for i in range(MANY)}}] * MANY,
    {"content": [None] * MANY},
]
MODELS = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, Speculative, StructuredOutputs, Message)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_wrong_is_told_once_however_often_it_is_there(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        for bad in BAD:
            try:
                model.model_validate({field.alias or name: bad})
            except ValidationError as problem:
                assert problem.error_count() <= 20, name


@pytest.mark.parametrize("model", (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, Speculative))
def test_one_name_that_nobody_knows_is_enough(model: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as problem:
        model.model_validate({f"unheard{i}": 1 for i in range(MANY)})
    told = problem.value.errors()
    assert [each["loc"] for each in told if each["type"] == "extra_forbidden"] == [("unheard0",)]
    assert len(told) <= 3


REFUSED: dict[str, Any] = {
    "logit_bias": {str(i): 1 for i in range(MOST_LISTED + 1)},
    "bad_words": ["a"] * (MOST_LISTED + 1),
    "stop_token_ids": [1] * (MOST_LISTED + 1),
    "allowed_token_ids": [1] * 100_000,
    "prompt": "x" * 2_000_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_every_step_would_look_at_have_an_end(assembly: Assembly, name: str) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json={"prompt": "a", name: REFUSED[name]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name, reply.text
        assert "at most" in reply.json()["error"]["message"]

    go(assembly, play)


def test_what_cannot_fit_is_refused_before_it_is_read(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly.tokenizer, "encode", None)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        long = "a" * (CONTEXT * assembly.tokenizer.longest_token + 1)
        reply = await client.post("/v1/completions", json={"prompt": ["b", long]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt"
        reply = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": long}]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"

    go(assembly, play)


def test_a_prediction_is_read_as_far_as_a_text_can_go(assembly: Assembly) -> None:
    expected = SpeculationChoice(prediction="The quick brown fox " * 100_000)
    (request,) = assembly.requests.make("a", [1], SamplingParams(), expected)
    assert len(request.prediction) == CONTEXT
    assert request.prediction == tuple(
        assembly.tokenizer.encode("The quick brown fox " * 999, add_special=False)[:CONTEXT]
    )


HALVES = {
    "cache_salt": '{"prompt": "a", "cache_salt": "\\ud800"}',
    "user": '{"prompt": "a", "user": "\\uDFff"}',
    "metadata.a.1": '{"prompt": "a", "metadata": {"a": ["b", "\\ud83d"]}}',
    "prompt": '{"prompt": "\\ude00\\ud83d"}',
    "body": '{"prompt": "a", "\\ud800": 1}',
    "messages.0.content": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "messages.0.tool_calls.0.function.name": '{"messages": [{"role": "assistant", "tool_calls": [{"function": '
    '{"name": "\\ud800", "arguments": "no"}}]}]}',
}


@pytest.mark.parametrize("field", HALVES)
def test_halves_of_characters_are_refused_where_they_stand(assembly: Assembly, field: str) -> None:
    path = "/v1/chat/completions" if "messages" in field else "/v1/completions"

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for body in (HALVES[field].encode(), json.dumps(json.loads(HALVES[field]), ensure_ascii=False)):
            sent = body if isinstance(body, bytes) else body.encode(errors="surrogatepass")
            reply = await client.post(path, content=sent, headers={"content-type": "application/json"})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == field and "surrogate" in reply.json()["error"]["message"]

    go(assembly, play)


def test_whole_characters_are_none(assembly: Assembly) -> None:
    assert half_at('{"prompt": "\\ud83d\\ude00 \\\\ud800 한글"}'.encode()) is None
    assert half_at(b"\\ud800 is no JSON") is None and half_at(b"[" * 100_000 + b'"\\ud800') is None

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        sent = b'{"prompt": "a \\ud83d\\ude00", "max_tokens": 1, "echo": true}'
        reply = await client.post("/v1/completions", content=sent, headers={"content-type": "application/json"})
        assert reply.json()["choices"][0]["text"].startswith("a \U0001f600")

    go(assembly, play)


def test_a_half_that_the_arguments_of_a_call_hide(assembly: Assembly) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages", reply.text

    go(assembly, play)


def test_a_template_may_have_variables_of_any_name(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for name in ("self", "value", "cls", "loop", "not a name"):
            body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200, name

    go(assembly, play)
