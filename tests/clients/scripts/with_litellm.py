"""litellm: OpenAI's, Anthropic's and Ollama's API by the prefix of the model, with streams and tools."""

from __future__ import annotations

import json

import litellm
from task import MODEL, PARAMETERS, QUESTION, URL, check_answer, check_stream, read_notes

litellm.telemetry = False
messages = [{"role": "user", "content": QUESTION}]
tool = {"type": "function", "function": {"name": "read_notes", "description": "Read", "parameters": PARAMETERS}}

for prefix, base in (("openai", f"{URL}/v1"), ("anthropic", URL), ("ollama_chat", URL)):
    asked = {"model": f"{prefix}/{MODEL}", "api_base": base, "api_key": "any", "max_tokens": 400}
    check_answer(litellm.completion(**asked, messages=messages).choices[0].message.content)
    stream = litellm.completion(**asked, messages=messages, stream=True)
    check_stream(chunk.choices[0].delta.content for chunk in stream)
    parts = list(litellm.completion(**asked, messages=messages, tools=[tool], stream=True))
    message = litellm.stream_chunk_builder(parts, messages=messages).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": read_notes(**json.loads(call.function.arguments))}
    end = litellm.completion(**asked, messages=[*messages, message.model_dump(), result], tools=[tool]).choices[0]
    assert end.finish_reason == "stop", (prefix, end)
    check_answer(end.message.content)
try:
    litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="any",
        messages=[{"role": "user", "content": "word " * 600_000}],
    )
    raise AssertionError("a prompt beyond the context was taken")
except litellm.ContextWindowExceededError:
    pass
