"""Hostile request bodies: rejected early, with a short error that names the field."""

from __future__ import annotations

import gc
import json
import re
import threading
import tracemalloc
from typing import Any

import httpx
import pytest
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from foretell.build.engine_builder import Assembly
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams
from foretell.server.config import ServerConfig
from foretell.server.json_body import LARGE, parse_json, parsed_bytes
from foretell.server.openai.chat_requests import (
    ChatCompletionRequest,
    ChatMessageParam,
    DetokenizeRequest,
    TokenizeRequest,
)
from foretell.server.openai.requests import MAX_LIST_ENTRIES, CompletionRequest, Speculative, StructuredOutputs
from foretell.server.preprocess import LONG_TOKEN_CHARS, RequestPreprocessor
from foretell.server.service import Service
from foretell.types import SpeculationChoice
from tests.server.in_process import run_app
from tests.server.process import CONTEXT

MANY = 5000
JSON = {"content-type": "application/json"}
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
MODELS = (
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    Speculative,
    StructuredOutputs,
    ChatMessageParam,
)


@pytest.mark.parametrize("model", MODELS)
def test_a_repeated_error_is_reported_once(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        for bad in BAD:
            try:
                model.model_validate({field.alias or name: bad})
            except ValidationError as problem:
                assert problem.error_count() <= 20, name


@pytest.mark.parametrize(
    "model", (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest, Speculative)
)
def test_only_the_first_unknown_field_is_reported(model: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as problem:
        model.model_validate({f"unheard{i}": 1 for i in range(MANY)})
    errors = problem.value.errors()
    assert [each["loc"] for each in errors if each["type"] == "extra_forbidden"] == [("unheard0",)]
    assert len(errors) <= 3


def test_ignored_fields_are_logged_once(assembly: Assembly, caplog: pytest.LogCaptureFixture) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "zzz": 1, "yyy\n": 2})

    caplog.set_level("INFO", "foretell")
    run_app(assembly, play)
    lines = [record.getMessage() for record in caplog.records if "ignored fields" in record.getMessage()]
    assert lines == ["/v1/completions: ignored fields: zzz, ?"]


REFUSED: dict[str, Any] = {
    "logit_bias": {str(i): 1 for i in range(MAX_LIST_ENTRIES + 1)},
    "bad_words": ["a"] * (MAX_LIST_ENTRIES + 1),
    "stop_token_ids": [1] * (MAX_LIST_ENTRIES + 1),
    "allowed_token_ids": [1] * 100_000,
    "prompt": "x" * 2_000_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_every_step_would_look_at_have_an_end(assembly: Assembly, name: str) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/completions", json={"prompt": "a", name: REFUSED[name]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name, reply.text
        assert re.search("at most|maximum", reply.json()["error"]["message"])

    run_app(assembly, play)


def test_prompts_that_cannot_fit_are_rejected_before_encoding(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly.tokenizer, "encode", None)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        long = "a" * (CONTEXT * assembly.tokenizer.longest_token + 1)
        reply = await client.post("/v1/completions", json={"prompt": ["b", long]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt"
        reply = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": long}]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"

    run_app(assembly, play)


def test_a_prediction_is_truncated_to_the_context(assembly: Assembly) -> None:
    expected = SpeculationChoice(prediction="The quick brown fox " * 100_000)
    (request,) = assembly.requests.make("a", [1], SamplingParams(), expected)
    assert len(request.prediction) == CONTEXT
    assert request.prediction == tuple(
        assembly.tokenizer.encode("The quick brown fox " * 999, add_special=False)[:CONTEXT]
    )


SURROGATES = {
    "cache_salt": '{"prompt": "a", "cache_salt": "\\ud800"}',
    "user": '{"prompt": "a", "user": "\\uDFff"}',
    "metadata": '{"prompt": "a", "metadata": {"a": ["b", "\\ud83d"]}}',
    "prompt": '{"prompt": "\\ude00\\ud83d"}',
    "name": '{"prompt": "a", "\\ud800": 1}',
    "high and a letter": '{"prompt": "\\ud83d\\u0041"}',
    "after an escaped backslash": '{"prompt": "\\\\ud83d\\ude00"}',
    "messages": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
}


@pytest.mark.parametrize("place", SURROGATES)
def test_unpaired_surrogates_are_rejected(assembly: Assembly, place: str) -> None:
    path = "/v1/chat/completions" if place == "messages" else "/v1/completions"

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = SURROGATES[place]
        for sent in (body.encode(), json.dumps(json.loads(body), ensure_ascii=False).encode(errors="surrogatepass")):
            reply = await client.post(path, content=sent, headers=JSON)
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["code"] == "invalid_json" and "not JSON" in reply.json()["error"]["message"]
        message = (await client.post(path, content=body.encode(), headers=JSON)).json()["error"]["message"]
        assert "surrogate pair" in message

    run_app(assembly, play)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_body_that_is_no_object_is_refused_with_what_would_work(assembly: Assembly, path: str) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        form = {"Content-Type": "application/x-www-form-urlencoded"}  # as `curl -d` sends
        for headers, reason in (
            (form, "add the header Content-Type: application/json"),
            (JSON, "must be a JSON object"),
        ):
            reply = await client.post(path, content=b'["a"]', headers=headers)
            assert reply.status_code == 400 and reason in reply.json()["error"]["message"]

    run_app(assembly, play)


def test_surrogate_pairs_and_escaped_backslashes_are_text(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        sent = b'{"prompt": "a \\ud83d\\ude00 \\\\ud800", "max_tokens": 1, "echo": true}'
        reply = await client.post("/v1/completions", content=sent, headers=JSON)
        assert reply.json()["choices"][0]["text"].startswith("a \U0001f600 \\ud800")

    run_app(assembly, play)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_bodies_in_another_encoding_are_refused(assembly: Assembly, encoding: str) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for text in ('{"prompt": "ab", "max_tokens": 1}', '{"prompt": "ab", "cache_salt": "\\ud800"}'):
            reply = await client.post("/v1/completions", content=text.encode(encoding), headers=JSON)
            assert reply.status_code == 400 and "UTF-8" in reply.json()["error"]["message"], reply.text

    run_app(assembly, play)


def test_a_utf8_byte_order_mark_is_skipped(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        sent = '{"prompt": "ab", "max_tokens": 1, "echo": true}'.encode("utf-8-sig")
        reply = await client.post("/v1/completions", content=sent, headers=JSON)
        assert reply.json()["choices"][0]["text"].startswith("ab"), reply.text

    run_app(assembly, play)


def test_large_bodies_are_parsed_in_another_thread(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, threading.Thread] = {}

    def parse(body: bytes) -> Any:
        threads[len(body)] = threading.current_thread()
        return parse_json(body)

    monkeypatch.setattr("foretell.server.json_body.parse_json", parse)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for size in (10, LARGE):
            body = {"prompt": "a", "max_tokens": 1, "user": "x" * size}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        small, large = threads.values()
        assert small is threading.current_thread() and large is not small

    run_app(assembly, play)
    assert gc.isenabled()


def test_the_estimate_of_parsed_bodies_is_an_upper_bound() -> None:
    """The bound holds for bodies made of the most expensive kind of value only."""
    values = [
        "[]", "[0]", "[[0]]", "{}", '{"":0}', '{"":{"":0}}', '"ab"', '"\uac00\uac01"', '"\U0001f600x"', "1e9", "999",
        '{"a":"bc"}', '{"a":[999]}', '"\\ud83d\\ude00"',
    ]  # fmt: skip
    bodies = [f"[{','.join([value] * 20_000)}]" for value in values]
    bodies += [json.dumps([f"{i:x}" for i in range(20_000)]), json.dumps({f"{i:x}": i for i in range(20_000)})]
    bodies += ['"' + "x" * 200_000 + '"', '"\U0001f600' + "x" * 200_000 + '"']
    bodies += ['"\\ud83d\\ude00' + "x" * 200_000 + '"']
    for body in bodies:
        sent = body.encode()
        tracemalloc.start()
        value = parse_json(sent)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert value is not None and held <= parsed_bytes(sent) + 4096, body[:20]


def test_a_half_that_the_arguments_of_a_call_hide(assembly: Assembly) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages", reply.text

    run_app(assembly, play)


def test_a_template_may_have_variables_of_any_name(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for name in ("self", "value", "cls", "loop", "not a name"):
            body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200, name

    run_app(assembly, play)


async def ask_spelling(client: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    reply = await client.post(path, json=body)
    return reply.status_code, reply.json().get("error", {})


def test_tokenize_and_detokenize_are_limited_to_the_context(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        longest = CONTEXT * assembly.tokenizer.longest_token
        for text in ("a" * (longest + 1), "1" * (CONTEXT + 1)):
            for field, body in (("prompt", text), ("messages", [{"role": "user", "content": text}])):
                status, error = await ask_spelling(client, "/tokenize", **{field: body})
                assert status == 400 and error["param"] == field and "length is 1024 tokens" in error["message"]
        status, error = await ask_spelling(client, "/detokenize", tokens=[1] * (CONTEXT + 1))
        assert status == 400 and error["param"] == "tokens" and "has 1025 tokens" in error["message"]
        assert (await ask_spelling(client, "/detokenize", tokens=[1] * CONTEXT))[0] == 200

    run_app(assembly, play)


def test_a_long_prompt_is_counted_part_by_part(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that could fit only with unusually long tokens is not encoded at once, which would take much memory."""
    encode, lengths = assembly.tokenizer.encode, []

    def noted(text: str, **flags: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, **flags)

    monkeypatch.setattr(assembly.tokenizer, "encode", noted)
    monkeypatch.setattr("foretell.server.preprocess.COUNT_CHUNK_CHARS", 1000)
    desk = RequestPreprocessor(assembly, ServerConfig())
    long = "1" * (CONTEXT * LONG_TOKEN_CHARS + 1)
    with pytest.raises(RequestError, match="at most 1024 tokens"):
        desk.check_length("prompt", long)
    assert lengths == [1000] * 3, "up to twice the context"
    desk.check_length("prompt", long[1:])
    assert len(lengths) == 3, "shorter ones are encoded once, by others"


def test_tokenizing_and_its_answer_are_made_in_a_worker(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    class Noted(JSONResponse):
        def render(self, content: Any) -> bytes:
            threads.append(threading.current_thread().name)
            return super().render(content)

    monkeypatch.setattr("foretell.server.routes.tokenize.JSONResponse", Noted)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        assert (await client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True})).status_code == 200
        assert (await client.post("/detokenize", json={"tokens": [1, 2]})).status_code == 200

    run_app(assembly, play)
    assert [name.startswith("foretell-preprocess") for name in threads] == [True, True]
