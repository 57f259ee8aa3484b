"""Anthropic's Messages API: translation, the stream of events, usage and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.server.anthropic.requests import MessagesRequest
from foretell.server.choice_state import ChoiceState
from foretell.server.preprocess import COUNT_CHUNK_CHARS
from foretell.server.service import Service
from tests.server.in_process import run_app
from tests.server.process import CONTEXT
from tests.server.scripted import CALLS, TEXT, THOUGHTS, answer_text, force_output

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "weather", "description": "What the weather is", "input_schema": PARAMETERS}
THINK = {"chat_template_kwargs": {"think": True}}
PATH = "/v1/messages"


async def ask(client: httpx.AsyncClient, **body: Any) -> Any:
    reply = await client.post(PATH, json={"messages": HELLO, "max_tokens": 16, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def events(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    reply = await client.post(
        PATH, json={"messages": HELLO, "max_tokens": 16, "temperature": 0, "stream": True, **body}
    )
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply.text
    found = []
    for event in reply.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream together as clients do, and check the order of its events."""
    assert [event["type"] for event in stream[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    message, texts = stream[0]["message"], {"text_delta": "text", "thinking_delta": "thinking"}
    assert message["content"] == [] and message["stop_reason"] is None
    open_block, arguments = None, ""
    for event in stream[2:-2]:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block, arguments = event["content_block"], ""
            message["content"].append(open_block)
        elif kind == "delta":
            delta = event["delta"]
            assert open_block is not None and event["index"] == len(message["content"]) - 1
            if delta["type"] in texts:
                open_block[texts[delta["type"]]] += delta[texts[delta["type"]]]
            elif delta["type"] == "signature_delta":
                open_block["signature"] = delta["signature"]
            else:
                arguments += delta["partial_json"]
        else:
            assert kind == "stop" and open_block is not None
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(arguments)
            open_block = None
    assert open_block is None
    return message | stream[-2]["delta"] | {"usage": message["usage"] | stream[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**{name: message[name] for name in ("role", "stop_reason", "stop_sequence", "model")}, "content": content}


def test_the_text_is_that_of_a_chat_completion_with_and_without_speculation(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        sampled = {"temperature": 1.0, "seed": 5, "top_k": 30, "top_p": 0.9, "max_tokens": 40}
        messages = [{"role": "system", "content": "Be brief"}, *HELLO]
        reply = await client.post("/v1/chat/completions", json={"messages": messages, **sampled})
        expected = reply.json()["choices"][0]["message"]["content"]
        for extra in ({}, {"speculative": False}, {"speculative": {"drafter": "ngram", "max_draft": 3}}):
            answer = await ask(client, system="Be brief", **sampled, **extra)
            assert [block["text"] for block in answer["content"]] == [expected]
            assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 40
        assert answer["speculation"]["lossless"] is True

    run_app(assembly, play)


def test_a_stream_holds_thinking_text_and_calls_of_the_complete_message(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_output(monkeypatch, answer_text())

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"tools": [WEATHER], "max_tokens": 400, **THINK}
        whole = await ask(client, **body)
        content = [{"type": "thinking", "thinking": THOUGHTS, "signature": "unsigned"}, {"type": "text", "text": TEXT}]
        content += [{"type": "tool_use", "name": call["name"], "input": call["arguments"]} for call in CALLS]
        assert without_ids(whole)["content"] == content and whole["stop_reason"] == "tool_use"
        ids = [block["id"] for block in whole["content"][2:]]
        assert len(set(ids)) == 2
        streamed = assembled(await events(client, **body))
        assert without_ids(streamed) == without_ids(whole)
        assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
        back = [*HELLO, {"role": "assistant", "content": whole["content"]}]
        back.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": each} for each in ids]})
        assert (await ask(client, messages=back, **body))["usage"]["cache_read_input_tokens"] > 0

    run_app(assembly, play)


def test_one_call_when_parallel_use_is_disabled(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    force_output(monkeypatch, answer_text(thoughts=False))

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        stream = await events(client, tools=[WEATHER], tool_choice=choice, max_tokens=400)
        assert [block["type"] for block in assembled(stream)["content"]] == ["text", "tool_use"]

    run_app(assembly, play)


def test_a_call_cut_by_the_limit_keeps_the_arguments_so_far(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_output(monkeypatch, answer_text(thoughts=False))

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        whole = await ask(client, tools=[WEATHER], max_tokens=400)
        cuts = [await ask(client, tools=[WEATHER], max_tokens=n) for n in range(1, whole["usage"]["output_tokens"])]
        assert {cut["stop_reason"] for cut in cuts} == {"max_tokens"}
        inputs = [block["input"] for cut in cuts for block in cut["content"] if block["type"] == "tool_use"]
        assert {"city": "Rome"} in inputs and all(isinstance(each, dict) for each in inputs)

    run_app(assembly, play)


def test_a_stop_sequence_is_named(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    force_output(monkeypatch, "one two three")

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        answer = await ask(client, stop_sequences=["three", "wo", "two", "four"], max_tokens=40)
        assert without_ids(answer)["content"] == [{"type": "text", "text": "one "}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
        streamed = assembled(await events(client, stop_sequences=["wo", "two"], max_tokens=40))
        assert without_ids(streamed) == without_ids(answer)
        ended = await ask(client, stop_sequences=["four"], max_tokens=40)
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)

    run_app(assembly, play)


def test_a_tool_choice_and_an_output_format_are_enforced(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        closed = {**WEATHER, "input_schema": {**PARAMETERS, "properties": {"city": {"enum": ["Rome"]}}}}
        closed["input_schema"]["required"] = ["city"]
        for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
            choice["disable_parallel_tool_use"] = True
            answer = await ask(client, tools=[closed], tool_choice=choice, max_tokens=200)
            assert without_ids(answer)["content"] == [
                {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
            ]
        schema = {"enum": ["yes"]}
        answer = await ask(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "max"})
        assert answer["content"] == [{"type": "text", "text": '"yes"'}]

    run_app(assembly, play)


def test_a_billing_line_does_not_defeat_the_prefix_cache(assembly: Assembly) -> None:
    """The checksum of Claude Code's first line differs in each request."""

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        rules = "Rules of the house. " * 20
        counts = []
        for checksum in ("a1b2c", "9f8e7"):
            line = f"x-anthropic-billing-header: cc_version=2.1; cch={checksum};"
            for system in ([{"type": "text", "text": line}, {"type": "text", "text": rules}], f"{line}\n\n{rules}"):
                counts.append((await ask(client, system=system))["usage"])
        plain = (await ask(client, system=rules))["usage"]
        totals = {use["input_tokens"] + use["cache_read_input_tokens"] for use in [*counts, plain]}
        assert len(totals) == 1, "the line is not part of the prompt"
        assert counts[0]["cache_read_input_tokens"] == 0 < min(use["cache_read_input_tokens"] for use in counts[1:])

    run_app(assembly, play)


def test_messages_become_those_of_a_chat() -> None:
    blocks = {
        "system": [
            {"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "B"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
            {"role": "system", "content": "C"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "3"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "ä"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "is_error": False, "content": "4"},
                    {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "5"}]},
                    {"type": "text", "text": "6"},
                ],
            },
        ],
        "thinking": {"type": "enabled", "budget_tokens": 7},
        "metadata": {"user_id": "x"},
        "context_management": {"edits": []},
    }
    body = MessagesRequest.model_validate(blocks)
    chat = body.to_chat(reasons=True)
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ä"}'}}
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "1\n\n2"},
        {"role": "system", "content": "C"},
        {"role": "assistant", "content": "3", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "tool", "tool_call_id": "t2", "content": "5"},
        {"role": "user", "content": "6"},
    ]
    assert chat.thinking_budget == 7 and chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert body.to_chat(reasons=False).thinking_budget is None, "a model without reasoning ignores it"


def test_tokens_are_counted_as_the_message_is_prefilled(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "system": "Be brief", "tools": [WEATHER]}
        counted = (await client.post(f"{PATH}/count_tokens?beta=true", json=body)).json()
        usage = (await ask(client, **body))["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}

    run_app(assembly, play)


def test_a_prompt_beyond_the_context_is_counted(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for words in (CONTEXT, 40 * CONTEXT):
            text = "word " * words
            body = {"messages": [{"role": "user", "content": text}]}
            prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            expected = len(assembly.tokenizer.encode(prompt, add_special=False))
            found = (await client.post(f"{PATH}/count_tokens", json=body)).json()["input_tokens"]
            borders = len(prompt) // COUNT_CHUNK_CHARS if words > CONTEXT else 0
            assert expected > CONTEXT and abs(found - expected) <= borders
            assert (await client.post(PATH, json=body)).status_code == 400

    run_app(assembly, play)


def test_ignored_fields_are_named_in_a_header(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {"messages": HELLO, "max_tokens": 1, "mcp_servers": [], "service_tier": "auto"}
        body |= {"container": "c", "context_management": {"edits": [{}]}, "sch\u00f6n\n": 1, "zzz": None}
        reply = await client.post(f"{PATH}?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
        assert reply.status_code == 200
        assert reply.headers["x-foretell-ignored-fields"] == "container, context_management, ?"

    run_app(assembly, play)


def test_a_failure_in_a_stream_has_anthropics_shape(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    add, seen = ChoiceState.add, []

    def failing(state: ChoiceState, item: Any) -> Any:
        seen.append(item)
        if len(seen) == 3:
            raise RuntimeError("planted")
        return add(state, item)

    monkeypatch.setattr(ChoiceState, "add", failing)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        stream = await events(client)
        assert stream[0]["type"] == "message_start" and stream[-1]["type"] == "error"
        assert stream[-1]["error"]["type"] == "api_error" and "planted" not in stream[-1]["error"]["message"]

    run_app(assembly, play)


def test_every_error_has_anthropics_shape(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        key = {"x-api-key": "k"}
        image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        cases: list[tuple[int, str, str, dict[str, Any]]] = [
            (401, "authentication_error", "x-api-key", {"headers": {"x-api-key": "other"}, "json": {}}),
            (404, "not_found_error", "'claude'", {"json": {"model": "claude", "messages": HELLO}}),
            (400, "invalid_request_error", "messages.0.content.0: is of type image", {"json": {"messages": image}}),
            (
                400,
                "invalid_request_error",
                "stop_sequences",
                {"json": {"messages": HELLO, "stop_sequences": ["a"] * 20}},
            ),
            (400, "invalid_request_error", "not JSON", {"content": b"{"}),
            (413, "request_too_large", "2000 bytes", {"content": b" " * 3000}),
        ]
        for status, kind, words, sent in cases:
            headers = {"content-type": "application/json", **key, **sent.pop("headers", {})}
            reply = await client.post(PATH, headers=headers, **sent)
            assert reply.status_code == status, reply.text
            assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == kind, reply.text
            assert words in reply.json()["error"]["message"]
        wrong = await client.get(PATH, headers=key)
        assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"

    run_app(assembly, play, api_key=("k",), max_body_bytes=2000)


def test_keys_in_either_header_are_the_same_tenant(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        async def cached(**headers: str) -> int:
            body = {"messages": [{"role": "user", "content": "secret " * 60}], "max_tokens": 1}
            reply = await client.post(PATH, json=body, headers=headers)
            return int(reply.json()["usage"]["cache_read_input_tokens"])

        first, second = {"x-api-key": "k"}, {"Authorization": "Bearer k"}
        assert await cached(**first) == 0 < await cached(**second)
        assert await cached(**{"x-api-key": "other"}) == 0

    run_app(assembly, play, api_key=("k", "other"))


def test_translated_requests_are_counted_and_logged_like_chats(assembly: Assembly, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    bodies: dict[str, dict[str, Any]] = {
        PATH: {"messages": HELLO, "max_tokens": 5},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 5},
        "/api/chat": {"messages": HELLO, "options": {"num_predict": 5}},
    }

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for path, body in bodies.items():
            for stream in (False, True):
                assert (await client.post(path, json={**body, "stream": stream})).status_code == 200
        text = (await client.get("/metrics")).text
        assert 'foretell:generation_tokens_total{model_name="tiny"} 30.0' in text
        assert 'foretell:request_success_total{finished_reason="length",model_name="tiny"} 6.0' in text

    run_app(assembly, play, log_requests=str(file))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["chat"] * 6
    assert {json.dumps(record["request"]["messages"]) for record in records} == {json.dumps(HELLO)}
    assert all(len(record["answers"][0]["token_ids"]) == 5 for record in records)
