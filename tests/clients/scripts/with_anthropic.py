"""anthropic: messages, their stream, tools and the token count."""

from __future__ import annotations

from anthropic import Anthropic
from task import MODEL, PARAMETERS, QUESTION, URL, check_answer, check_stream, read_notes

client = Anthropic(base_url=URL, api_key="any", max_retries=0)
asked = {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": QUESTION}]}
tools = [{"name": "read_notes", "description": "Read the notes", "input_schema": PARAMETERS}]

assert [model.id for model in client.models.list()] == [MODEL]
assert client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens > 0
check_answer(client.messages.create(**asked).content[0].text)
with client.messages.stream(**asked) as stream:
    check_stream(stream.text_stream)
with client.messages.stream(**asked, tools=tools) as stream:
    message = stream.get_final_message()
assert message.stop_reason == "tool_use"
(call,) = (block for block in message.content if block.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": read_notes(**call.input)}
turns = [
    *asked["messages"],
    {"role": "assistant", "content": message.content},
    {"role": "user", "content": [result]},
]
end = client.messages.create(**{**asked, "messages": turns}, tools=tools)
assert end.stop_reason == "end_turn"
check_answer(end.content[0].text)
