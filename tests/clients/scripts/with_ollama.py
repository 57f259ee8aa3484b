"""ollama: the model list, chats with tools, streams and a JSON schema."""

from __future__ import annotations

import json

from ollama import Client
from task import MODEL, QUESTION, URL, check_answer, check_stream, read_notes

client = Client(host=URL)
messages = [{"role": "user", "content": QUESTION}]

assert [model.model for model in client.list().models] == [MODEL]
assert [model.model for model in client.ps().models] == [MODEL]
assert "tools" in client.show(MODEL).capabilities
check_answer(client.chat(model=MODEL, messages=messages).message.content)
check_stream(part.message.content for part in client.chat(model=MODEL, messages=messages, stream=True))
check_stream(part.response for part in client.generate(model=MODEL, prompt=QUESTION, stream=True))
parts = list(client.chat(model=MODEL, messages=messages, tools=[read_notes], stream=True))
(call,) = (call for part in parts for call in part.message.tool_calls or ())
result = {"role": "tool", "tool_name": "read_notes", "content": read_notes(**call.function.arguments)}
turns = [*messages, {"role": "assistant", "tool_calls": [call]}, result]
end = client.chat(model=MODEL, messages=turns, tools=[read_notes])
assert end.done and end.done_reason == "stop" and end.eval_count > 0
check_answer(end.message.content)
schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
found = client.chat(model=MODEL, messages=messages, format=schema, options={"num_predict": 100})
assert json.loads(found.message.content) == {"word": "walnut"}
