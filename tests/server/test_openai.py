"""The openai package against a server process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.server.process import ServerProcess

TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def test_a_chat_is_answered(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, seed=1)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12 and choice.finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_the_same_seed_gives_the_same_output_with_and_without_speculation(client: Any) -> None:
    def ask(**extra: object) -> Any:
        done = client.completions.create(model="tiny", prompt=TEXT, max_tokens=40, seed=5, extra_body=extra)
        return done.choices[0].text

    assert ask() == ask() == ask(speculative=False) == ask(speculative={"drafter": "ngram", "max_draft": 3})
    assert ask() == ask(**{"speculative.n_max": 0})


def test_a_stream_equals_the_complete_response(client: Any) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "seed": 3, "temperature": 1.0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 30
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].timings["predicted_n"] == 30


def test_several_choices_differ_and_stream_by_index(client: Any) -> None:
    asked: Any = {"model": "tiny", "prompt": TEXT, "max_tokens": 10, "seed": 3, "n": 3, "temperature": 1.0}
    whole = client.completions.create(**asked)
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_many_at_once_from_an_event_loop(server: ServerProcess) -> None:
    async def ask_all() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            asked = [
                client.completions.create(model="tiny", prompt=TEXT, max_tokens=20, seed=7, temperature=1.0)
                for _ in range(8)
            ]
            texts = [done.choices[0].text for done in await asyncio.gather(*asked)]
            stream = await client.completions.create(
                model="tiny", prompt=TEXT, max_tokens=20, seed=7, temperature=1.0, stream=True
            )
            return texts, "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    texts, streamed = asyncio.run(ask_all())
    assert set(texts) == {streamed}


def test_stops_and_limits(client: Any) -> None:
    whole = client.completions.create(model="tiny", prompt=TEXT, max_tokens=30, temperature=0).choices[0].text
    stop = whole[5:7]
    cut = client.completions.create(model="tiny", prompt=TEXT, max_tokens=30, temperature=0, stop=stop).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    newer = client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=3, max_tokens=50)
    assert newer.usage is not None and newer.usage.completion_tokens == 3


def test_log_probabilities_streamed_and_not(client: Any) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(whole) == 8 and all(len(row.top_logprobs) == 3 for row in whole)
    assert all(row.token == row.top_logprobs[0].token and row.logprob <= 0 for row in whole), "greedy takes the first"
    assert all(bytes(row.bytes).decode(errors="replace") == row.token for row in whole)
    streamed = [
        row
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for row in choice.logprobs.content
    ]
    assert [row.token for row in streamed] == [row.token for row in whole]
    assert [row.logprob for row in streamed] == pytest.approx([row.logprob for row in whole], abs=1e-4)


def test_structured_output(client: Any) -> None:
    schema: Any = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}}
    schema |= {"required": ["age"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format=wanted, max_tokens=200, temperature=0
    )
    assert 0 <= json.loads(answer.choices[0].message.content)["age"] <= 99
    for extra, options in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"structured_outputs": {"regex": "a{3}"}}, ("aaa",)),
        ({"guided_grammar": 'start: "left" | "right"'}, ("left", "right")),
    ):
        chosen = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, extra_body=extra)
        assert chosen.choices[0].message.content in options


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called_streamed_and_not(client: Any, choice: object) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 120,
        "seed": 4,
    }
    asked["parallel_tool_calls"] = False
    whole = client.chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            assert part.index == 0
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments)


def test_a_conversation_with_a_tools_answer(client: Any) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    done = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], max_tokens=4)
    assert done.usage.completion_tokens <= 4


def test_thoughts_come_apart(client: Any) -> None:
    extra: Any = {"chat_template_kwargs": {"think": True}, "thinking_budget": 6}
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "seed": 2, "extra_body": extra}
    answer = client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert message.reasoning_content and "</think>" not in message.reasoning_content + message.content
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < 24
    thoughts, words = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for each in chunk.choices:
            thoughts += getattr(each.delta, "reasoning_content", None) or ""
            words += each.delta.content or ""
    assert (thoughts, words) == (message.reasoning_content, message.content)


def test_errors_are_the_ones_programs_catch(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert wrong.value.param == "temperature" and "temperature" in wrong.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt="word " * 2000)


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
