"""OpenAI's Responses API: the openai package against a server process, the order of events, stored responses."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest

from foretell.build.engine_builder import Assembly
from foretell.server.choice_state import ChoiceState
from foretell.server.errors import ApiError
from foretell.server.json_body import parsed_bytes
from foretell.server.openai_responses.requests import ResponsesRequest
from foretell.server.openai_responses.store import ResponseStore, StoredResponse
from foretell.server.service import Service
from tests.server.in_process import run_app
from tests.server.process import CONTEXT, ServerProcess
from tests.server.scripted import CALLS, TEXT, THOUGHTS, answer_text, force_output
from tests.waiting import TIMEOUT

PATH = "/v1/responses"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
LOOSE: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
THINK = {"chat_template_kwargs": {"think": True}}


def test_the_openai_package_gets_text_and_continues_it(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(**asked, input="Hello", instructions="Be brief", metadata={"a": "b"})
    assert first.status == "incomplete" and first.output_text and first.metadata == {"a": "b"}
    again: Any = {"role": "assistant", "content": first.output_text}
    users: list[Any] = [{"role": "user", "content": text} for text in ("Hello", "And now?")]
    second = client.responses.create(**asked, input="And now?", previous_response_id=first.id)
    whole = client.responses.create(**asked, input=[users[0], again, users[1]], store=False)
    assert second.output_text == whole.output_text
    assert second.usage is not None and whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    for gone in (second.id, whole.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)


def test_the_openai_package_streams_a_call_and_parses_a_format(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 300, "parallel_tool_calls": False}
    asked |= {"tools": [WEATHER, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "weather"}}
    with client.responses.stream(**asked, input="Weather?") as stream:
        numbers = [event.sequence_number for event in stream]
        (call,) = stream.get_final_response().output
    assert numbers == list(range(len(numbers)))
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Rome"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turn: Any = [{"role": "user", "content": "Weather?"}, call.model_dump(), result]
    answer = client.responses.create(model="tiny", input=turn, tools=[WEATHER], max_output_tokens=4)
    assert answer.output and answer.tools[0].type == "function"
    yes: Any = {"format": {"type": "json_schema", "name": "yes", "schema": {"enum": ["yes"]}}}
    assert client.responses.create(model="tiny", input="Yes?", text=yes).output_text == '"yes"'


async def stream_events(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    reply = await client.post(PATH, json={"input": "Hello", "stream": True, "temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return [json.loads(event.split("data: ", 1)[1]) for event in reply.text.split("\n\n")[:-1]]


def check_order(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order of all events of a stream; return the response of the last."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    items: list[dict[str, Any]] = []
    text, part = "", None
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            text, part = "", None
            continue
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            items[-1] = event["item"]
            continue
        assert event["item_id"] == items[-1]["id"]
        if kind == "content_part.added":
            part = event["part"]
            assert part["text"] == ""
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == text and event["part"]["type"] == (part or {})["type"]
        else:
            assert kind.endswith(".done") and event.get("text", event.get("arguments")) == text
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}" and response["output"] == items
    return response


def shape(items: list[dict[str, Any]]) -> list[Any]:
    """Return type and text of each item."""
    return [(item["type"], item.get("arguments") or item["content"][0]["text"]) for item in items]


def test_all_events_come_in_order_and_add_up_to_the_complete_response(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_output(monkeypatch, answer_text())

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {"tools": [LOOSE], "max_output_tokens": 400, **THINK}
        streamed = check_order(await stream_events(client, **body))
        calls = [("function_call", json.dumps(call["arguments"])) for call in CALLS]
        expected = [("reasoning", THOUGHTS), ("message", TEXT), *calls]
        assert shape(streamed["output"]) == expected and streamed["status"] == "completed"
        whole = (await client.post(PATH, json={"input": "Hello", "temperature": 0, **body})).json()
        assert (
            shape(whole["output"]) == expected and whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"]
        )
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
            for item in streamed["output"][2:]
        ]
        following = {"input": results, "previous_response_id": streamed["id"], **body}
        reply = (await client.post(PATH, json=following)).json()
        assert reply["usage"]["input_tokens_details"]["cached_tokens"] > 0, reply

    run_app(assembly, play)


def test_a_limit_makes_the_response_incomplete(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        response = check_order(await stream_events(client, max_output_tokens=5))
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][-1]["status"] == "incomplete"

    run_app(assembly, play)


def test_a_stream_that_fails_ends_with_a_failed_response(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    add, seen = ChoiceState.add, []

    def failing(state: ChoiceState, item: Any) -> Any:
        seen.append(item)
        if len(seen) == 3:
            raise RuntimeError("planted")
        return add(state, item)

    monkeypatch.setattr(ChoiceState, "add", failing)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        events = await stream_events(client, max_output_tokens=20)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        last = events[-1]
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert (await client.get(f"{PATH}/{last['response']['id']}")).status_code == 404

    run_app(assembly, play)


def test_stored_responses_belong_to_one_key(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("a", "b"))
        body = {"input": "Hello", "max_output_tokens": 2}
        first = (await client.post(PATH, json=body, headers=mine)).json()
        follow = {**body, "previous_response_id": first["id"]}
        for reply in (
            await client.post(PATH, json=follow, headers=other),
            await client.get(f"{PATH}/{first['id']}", headers=other),
            await client.delete(f"{PATH}/{first['id']}", headers=other),
        ):
            assert reply.status_code == 404 and reply.json()["error"]["code"] == "previous_response_not_found"
        assert (await client.post(PATH, json=follow, headers=mine)).status_code == 200
        assert (await client.delete(f"{PATH}/{first['id']}", headers=mine)).json()["deleted"] is True
        assert (await client.post(PATH, json=follow, headers=mine)).status_code == 404

    run_app(assembly, play, api_key=("a", "b"))


def test_input_tokens_are_counted_as_they_are_prefilled(client: openai.OpenAI, server: ServerProcess) -> None:
    asked: Any = {"model": "tiny", "instructions": "Be brief", "tools": [LOOSE]}
    first = client.responses.create(**asked, input="Hello", max_output_tokens=4)
    following: Any = {**asked, "input": "And?", "previous_response_id": first.id}
    for body in ({**asked, "input": "Hello"}, following):
        response = client.responses.create(**body, max_output_tokens=4)
        assert response.usage is not None
        assert client.responses.input_tokens.count(**body).input_tokens == response.usage.input_tokens
    assert client.responses.input_tokens.count(input="word " * 3 * CONTEXT).input_tokens > 3 * CONTEXT
    error = server.post(f"{PATH}/input_tokens", 404, input="a", previous_response_id="resp_other")["error"]
    assert error["code"] == "previous_response_not_found"
    assert server.post(f"{PATH}/input_tokens", 400, input="a", conversation="c")["error"]["param"] == "conversation"
    missing = server.http.get(f"{PATH}/{first.id}/input_items")
    assert missing.status_code == 404 and "input items are not kept" in missing.json()["error"]["message"]


def test_the_store_can_be_turned_off(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        first = (await client.post(PATH, json={"input": "Hello", "max_output_tokens": 2, "store": True})).json()
        assert first["store"] is False
        reply = await client.post(PATH, json={"input": "a", "previous_response_id": first["id"]})
        assert reply.status_code == 400 and "stores no responses" in reply.json()["error"]["message"]

    run_app(assembly, play, response_store_bytes=0)


def test_a_conversation_cannot_outgrow_a_body_turn_by_turn(assembly: Assembly) -> None:
    """The template leaves reasoning out, so that its tokens do not end the conversation."""

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 900}]}
        body: dict[str, Any] = {"input": [{"role": "user", "content": "a"}, thought], "max_output_tokens": 1}
        statuses = []
        for _ in range(5):
            reply = await client.post(PATH, json=body)
            statuses.append(reply.status_code)
            body["previous_response_id"] = reply.json().get("id")
        assert statuses[:3] == [200, 200, 200] and 404 in statuses[3:], statuses

    run_app(assembly, play, max_body_bytes=3000, max_held_bytes=1 << 20)


def entry(text: str, *contents: str, earlier: StoredResponse | None = None) -> StoredResponse:
    return StoredResponse.encode({"text": text}, earlier, [{"role": "user", "content": each} for each in contents])


def test_the_store_is_bounded_in_bytes() -> None:
    async def play() -> None:
        store = ResponseStore(10_000, 5_000)
        for number in range(50):
            store.put("me", str(number), entry("", "x" * 1000))
            await store.get("me", "0") if number < 3 else None  # used last, so it is dropped after the others
            assert store.num_bytes <= 10_000
        assert 3 <= len(store) <= 8 and (await store.get("me", "49")).messages()[0]["content"] == "x" * 1000
        kept = len(store)
        store.put("me", "long", entry("", "x" * 6_000))
        assert len(store) == kept, "a conversation longer than a body is not kept, and takes the place of no other"
        with pytest.raises(ApiError, match="send the whole input"):
            await store.conversation("me", "long")
        store.put("me", "huge", entry("x" * 20_000))
        assert len(store) == store.num_bytes == 0
        for number in range(3):
            store.put("me", str(number), entry(""))
        await store.delete("me", "1")
        assert len(store) == 2 and store.num_bytes > 0

    asyncio.run(play())


def test_a_conversation_grows_without_being_parsed() -> None:
    first = entry("a", "1", "\U0001f600")
    for earlier, contents in ((None, []), (first, ["1", "\U0001f600"]), (entry("b"), [])):
        for new in ([], ["2"], ["2", '"],[']):
            found = entry("c", *new, earlier=earlier)
            assert [message["content"] for message in found.messages()] == [*contents, *new]
            assert json.loads(found.response) == {"text": "c"}
            assert found.held_bytes == len(found.conversation) + parsed_bytes(found.conversation)


def test_a_response_is_encoded_and_its_conversation_parsed_in_a_worker(
    assembly: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[tuple[str, str]] = []
    encode, messages = StoredResponse.encode, StoredResponse.messages

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            threads.append((name, threading.current_thread().name[: len("foretell-preprocess")]))
            return function(*args)

        return call

    monkeypatch.setattr(StoredResponse, "encode", noted("encode", encode))
    monkeypatch.setattr(StoredResponse, "messages", noted("parse", messages))

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        first = (await client.post(PATH, json={"input": "Hello", "max_output_tokens": 2})).json()
        again = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 2}
        assert (await client.post(PATH, json=again)).status_code == 200
        assert (await client.get(f"{PATH}/{first['id']}")).json() == first

    run_app(assembly, play)
    assert threads == [(name, "foretell-preprocess") for name in ("encode", "parse", "encode")]


def test_a_response_can_be_continued_as_soon_as_it_is_sent(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    release, encode = threading.Event(), StoredResponse.encode
    monkeypatch.setattr(StoredResponse, "encode", lambda *args: release.wait(TIMEOUT) and encode(*args))

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        first = (await client.post(PATH, json={"input": "Hello", "max_output_tokens": 2})).json()
        reading = asyncio.ensure_future(client.get(f"{PATH}/{first['id']}"))
        other = await client.get(f"{PATH}/resp_other")
        assert other.status_code == 404 and not reading.done(), "it waits for no other"
        release.set()
        assert (await reading).json() == first
        monkeypatch.setattr(StoredResponse, "encode", lambda *args: 1 / 0)
        second = (await client.post(PATH, json={"input": "Hello", "max_output_tokens": 2})).json()
        assert (await client.get(f"{PATH}/{second['id']}")).status_code == 404

    run_app(assembly, play)


def test_a_stored_conversation_counts_like_a_body(assembly: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    release, step = threading.Event(), assembly.engine.step
    release.set()
    force_output(monkeypatch, "hi")  # an escape in it would make its bound four times as large
    monkeypatch.setattr(assembly.engine, "step", lambda: release.wait(TIMEOUT) and step())

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 8_000}]}
        body: dict[str, Any] = {"input": [{"role": "user", "content": "a"}, thought], "max_output_tokens": 1}
        long = (await client.post(PATH, json=body)).json()["id"]
        short = (await client.post(PATH, json={"input": "a", "max_output_tokens": 1})).json()["id"]
        release.clear()

        async def going_on(response: str) -> asyncio.Task[httpx.Response]:
            ahead = service.engine.num_sequences
            asked = {"input": "b", "max_output_tokens": 1, "previous_response_id": response}
            task = asyncio.ensure_future(client.post(PATH, json=asked))
            while service.engine.num_sequences == ahead and not task.done():
                await asyncio.sleep(0.001)
            return task

        first, second, third = [await going_on(response) for response in (short, long, long)]
        assert not first.done() and not second.done()
        refused = await third
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "bodies_full"
        fourth = await going_on(short)
        release.set()
        for reply in (first, second, fourth):
            assert (await reply).status_code == 200
        assert (await (await going_on(long))).status_code == 200, "the room is free again"

    run_app(assembly, play, max_body_bytes=20_000, max_held_bytes=32_000)


def test_items_become_messages_of_a_chat() -> None:
    asked = {
        "instructions": "A",
        "input": [
            {"role": "developer", "content": "B"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "2", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
            {"role": "assistant", "content": "5"},
        ],
        "tools": [WEATHER, {**WEATHER, "name": "other"}, {"type": "namespace", "name": "n", "tools": []}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]},
        "reasoning": {"effort": "xhigh", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }
    body = ResponsesRequest.model_validate(asked)
    chat = body.to_chat([])
    calls = [
        {"id": f"c{i + 1}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate((("f", "{}"), ("g", '{"a": 1}')))
    ]
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {"role": "system", "content": "A"},
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "assistant", "content": "5"},
    ]
    assert chat.tools is not None and [tool.function.name for tool in chat.tools] == ["other"]
    assert chat.tool_choice == "required" and body.hosted_tools == ["tools.namespace"]
    assert (chat.chat_template_kwargs or {})["reasoning_effort"] == "high"


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "input.0": ("refers to an item", {"input": [{"type": "item_reference", "id": "x"}]}),
    "input.0.content.0": ("is an image", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    "input.0.role": ("must be one of", {"input": [{"role": "king", "content": "x"}]}),
    "background": ("is not supported", {"background": True}),
    "conversation": ("previous_response_id", {"conversation": "conv_1"}),
    "max_output_tokens": ("must be 1 or more", {"max_output_tokens": 0}),
    "text.format": ("must have type", {"text": {"format": {"type": "xml"}}}),
    "tool_choice": ("must be auto", {"tool_choice": {"type": "web_search"}}),
    "input": ("is missing", {"input": None}),
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_is_refused_is_named(assembly: Assembly, param: str) -> None:
    words, fields = REFUSED[param]

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post(PATH, json={"input": "Hello", **fields})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == param and words in error["message"], reply.text

    run_app(assembly, play)
