"""openai: chat completions and responses, with the model list, streams, tools and parsed output."""

from __future__ import annotations

import json

from openai import OpenAI
from pydantic import BaseModel
from task import MODEL, PARAMETERS, QUESTION, URL, check_answer, check_stream, read_notes

client = OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0)
messages = [{"role": "user", "content": QUESTION}]


class Notes(BaseModel):
    word: str


def chat_completions() -> None:
    check_answer(client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content)
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    check_stream(chunk.choices[0].delta.content for chunk in stream)
    tool = {"type": "function", "function": {"name": "read_notes", "parameters": PARAMETERS}}
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[tool]) as events:
        message = events.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    result = read_notes(**json.loads(call.function.arguments))
    turns = [*messages, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    end = client.chat.completions.create(model=MODEL, messages=turns, tools=[tool]).choices[0]
    assert end.finish_reason == "stop"
    check_answer(end.message.content)
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Notes)
    assert parsed.choices[0].message.parsed == Notes(word="walnut")


def responses() -> None:
    check_answer(client.responses.create(model=MODEL, input=QUESTION).output_text)
    tool = {"type": "function", "name": "read_notes", "parameters": PARAMETERS, "strict": False}
    with client.responses.stream(model=MODEL, input=QUESTION, tools=[tool]) as events:
        first = events.get_final_response()
    (call,) = (item for item in first.output if item.type == "function_call")
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": read_notes(**json.loads(call.arguments)),
    }
    stream = client.responses.create(
        model=MODEL, input=[result], previous_response_id=first.id, tools=[tool], stream=True
    )
    check_stream(event.delta for event in stream if event.type == "response.output_text.delta")
    assert client.responses.parse(model=MODEL, input=QUESTION, text_format=Notes).output_parsed == Notes(word="walnut")


assert [model.id for model in client.models.list()] == [MODEL]
chat_completions()
responses()
