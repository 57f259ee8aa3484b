"""Ollama's API: its JSON lines, models, options and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.server.ollama.requests import OllamaChatRequest, OllamaGenerateRequest
from foretell.server.routes.ollama import raw_completion
from foretell.server.service import Service
from tests.server.in_process import run_app
from tests.server.process import CONTEXT
from tests.server.scripted import CALLS, TEXT, THOUGHTS, answer_text, force_output

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 16}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def lines(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/x-ndjson", reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


async def whole(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    reply = await client.post(path, json={**body, "stream": False})
    assert reply.status_code == 200, reply.text
    return reply.json()


def check_end(last: dict[str, Any], tokens: int) -> None:
    """Check the fields of the last line."""
    assert last["done"] is True and last["eval_count"] == tokens and last["prompt_eval_count"] > 0
    assert all(isinstance(last[name], int) and last[name] >= 0 for name in DURATIONS)
    assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"] + 2


def test_a_chat_streams_the_text_of_a_chat_completion(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post("/v1/chat/completions", json={"messages": HELLO, "temperature": 0, "max_tokens": 16})
        expected = reply.json()["choices"][0]["message"]["content"]
        for extra in ({}, {"speculative": False}):
            parts = await lines(client, "/api/chat", model="tiny:latest", messages=HELLO, options=GREEDY, **extra)
            assert "".join(part["message"]["content"] for part in parts) == expected
            assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
            assert parts[-1]["done_reason"] == "length"
            check_end(parts[-1], 16)
        assert (await whole(client, "/api/chat", messages=HELLO, options=GREEDY))["message"]["content"] == expected

    run_app(assembly, play)


def test_thinking_and_calls_are_separate(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    force_output(monkeypatch, answer_text())

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "tools": [WEATHER], "chat_template_kwargs": {"think": True}, "think": True}
        message = (await whole(client, "/api/chat", **body))["message"]
        assert message["thinking"] == THOUGHTS and message["content"] == TEXT
        calls = [call["function"] for call in message["tool_calls"]]
        assert calls == [{"index": i, **call} for i, call in enumerate(CALLS)]
        parts = [part["message"] for part in await lines(client, "/api/chat", **body)]
        assert "".join(part.get("thinking", "") for part in parts) == THOUGHTS
        assert "".join(part["content"] for part in parts) == TEXT
        assert [call["function"] for part in parts for call in part.get("tool_calls", [])] == calls
        history = [*HELLO, message, *({"role": "tool", "content": "sunny", "tool_name": "weather"} for _ in CALLS)]
        assert (await whole(client, "/api/chat", **{**body, "messages": history}))["done"] is True

    run_app(assembly, play)


def test_results_without_ids_belong_to_the_calls_before_them() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    results = [{"role": "tool", "content": text, "tool_name": "f"} for text in "xy"]
    body = OllamaChatRequest.model_validate({"messages": [{"role": "assistant", "tool_calls": [call, call]}, *results]})
    asked, first, second = body.to_chat("tiny").messages
    assert asked.tool_calls is not None
    assert (
        [each.id for each in asked.tool_calls]
        == [first.tool_call_id, second.tool_call_id]
        == ["call00000", "call00001"]
    )
    assert asked.tool_calls[0].function.arguments == '{"a": 1}' and first.name == "f"


def test_a_prompt_is_generated_from(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        chat = await whole(client, "/api/chat", messages=[{"role": "system", "content": "A"}, *HELLO], options=GREEDY)
        answer = await whole(client, "/api/generate", prompt="Hello", system="A", options=GREEDY)
        assert answer["response"] == chat["message"]["content"]
        asked = {"prompt": "Hello", "max_tokens": 16, "temperature": 0}
        expected = (await client.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
        raw = await lines(client, "/api/generate", prompt="Hello", raw=True, options=GREEDY)
        assert "".join(part["response"] for part in raw) == expected
        check_end(raw[-1], 16)
        schema = {"enum": ["yes"]}
        assert (await whole(client, "/api/generate", prompt="Hello", format=schema))["response"] == '"yes"'
        loaded = await whole(client, "/api/generate", keep_alive=0)
        assert (loaded["response"], loaded["done_reason"]) == ("", "unload")

    run_app(assembly, play)


def test_a_raw_prompt_continues_to_the_end_of_the_context(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        prompt = "word " * 190  # leaves a few tokens
        counts = await whole(client, "/api/generate", prompt=prompt, raw=True, ignore_eos=True, options={"seed": 1})
        assert counts["prompt_eval_count"] + counts["eval_count"] == CONTEXT or counts["done_reason"] == "stop"
        assert counts["eval_count"] != 16, "the default of /v1/completions"

    run_app(assembly, play)


def test_a_raw_prompt_that_is_not_streamed_is_bounded(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        preprocessor = service.preprocessor
        for stream, limit in ((False, 7), (True, CONTEXT - 1), (None, CONTEXT - 1)):
            body = OllamaGenerateRequest.model_validate({"prompt": "a", "raw": True, "stream": stream})
            assert raw_completion(preprocessor, body, "tiny").max_tokens == limit, stream
        answer = await whole(client, "/api/generate", prompt="Hello", raw=True, options={"temperature": 0})
        assert answer["eval_count"] == 7 and answer["done_reason"] == "length"

    run_app(assembly, play, unstreamed_max_tokens=7)


def test_the_model_is_described(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for path in ("/api/tags", "/api/ps"):
            (entry,) = (await client.get(path)).json()["models"]
            assert entry["name"] == "tiny" and entry["size"] == service.memory.weights > 0
        info = (await client.post("/api/show", json={"model": "tiny:latest"})).json()
        architecture = info["model_info"]["general.architecture"]
        assert info["model_info"][f"{architecture}.context_length"] == CONTEXT
        assert info["capabilities"] == ["completion", "tools", "thinking"] and "im_start" in info["template"]
        service.preprocessor.tool_parser, service.preprocessor.reasoning_tags = "harmony", None
        assert "thinking" in (await client.post("/api/show", json={})).json()["capabilities"]
        assert (await client.get("/server_info")).json()["reasoning"] is True
        service.preprocessor.tool_parser = None
        assert (await client.post("/api/show", json={})).json()["capabilities"] == ["completion"]
        assert (await client.get("/api/version")).json()["version"].count(".") == 2
        assert (await client.head("/")).status_code == 200
        missing = await client.post("/api/show", json={"model": "other:latest"})
        assert missing.status_code == 404 and "available: tiny" in missing.json()["error"]

    run_app(assembly, play)


def test_options_have_their_effect_or_are_named(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        options = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "seed": 3, "num_predict": -1}
        options |= {"stop": "e", "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2}
        chat = OllamaChatRequest.model_validate({"messages": HELLO, "options": options}).to_chat("tiny")
        assert (chat.temperature, chat.top_k, chat.top_p, chat.min_p, chat.seed) == (0.7, 9, 0.9, 0.05, 3)
        assert (chat.stop, chat.repetition_penalty, chat.max_tokens) == (["e"], 1.2, None)
        assert (chat.presence_penalty, chat.frequency_penalty, chat.stream) == (0.1, 0.2, True)
        floats = {"seed": 3.0, "top_k": 9.0, "num_predict": 5.0}
        chat = OllamaChatRequest.model_validate({"messages": HELLO, "options": floats}).to_chat("tiny")
        assert (chat.seed, chat.top_k, chat.max_tokens) == (3, 9, 5)
        sent = {"messages": HELLO, "options": {"num_predict": 1, "num_ctx": 4096, "mirostat": 0, "zzz": 1}}
        reply = await client.post("/api/chat", json=sent)
        assert reply.headers["x-foretell-ignored-fields"] == "options.num_ctx, options.zzz"

    run_app(assembly, play)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "images": ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}),
    "suffix": ("/api/generate", {"prompt": "a", "suffix": "b"}),
    "context": ("/api/generate", {"prompt": "a", "context": [1]}),
    "options.temperature": ("/api/chat", {"messages": HELLO, "options": {"temperature": "hot"}}),
    "options.top_p": ("/api/chat", {"messages": HELLO, "options": {"top_p": 7}}),
    "options.repeat_penalty": ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": -1}}),
    "options.seed": ("/api/chat", {"messages": HELLO, "options": {"seed": 4.5}}),
    "format": ("/api/chat", {"messages": HELLO, "format": "xml"}),
    "logprobs": ("/api/chat", {"messages": HELLO, "logprobs": True}),
    "have no embeddings": ("/api/embed", {"input": "a"}),
    "no embeddings": ("/v1/embeddings", {"input": "a"}),
    "chosen when the server starts": ("/api/pull", {"model": "a"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_is_named(assembly: Assembly, words: str) -> None:
    path, body = REFUSED[words]

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post(path, json=body)
        error = reply.json()["error"]
        assert reply.status_code in (400, 404), reply.text
        assert words.removeprefix("have ") in (error if path.startswith("/api/") else error["message"])

    run_app(assembly, play)


def test_forms_are_taken_from_programs_and_not_from_web_pages(assembly: Assembly) -> None:
    """A page of another site can send a form without asking; curl -d sends one, too, but names no origin."""

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = b'{"prompt": "a", "stream": false, "options": {"num_predict": 1}}'
        for kind in ("application/x-www-form-urlencoded", "text/plain"):
            headers = {"content-type": kind}
            assert (await client.post("/api/generate", content=body, headers=headers)).status_code == 200
            headers["origin"] = "http://evil.example"
            refused = await client.post("/api/generate", content=body, headers=headers)
            assert refused.status_code == 400 and isinstance(refused.json()["error"], str)

    run_app(assembly, play)
