"""llama-index: OpenAILike with a stream, a tool and structured output by tools."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from task import MODEL, QUESTION, URL, check_answer, check_stream, read_notes


class Notes(BaseModel):
    """The notes."""

    word: str


model = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="any",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=100_000,
    max_retries=0,
)
asked = ChatMessage(role="user", content=QUESTION)
check_answer(model.chat([asked]).message.content)
check_stream(part.delta for part in model.stream_chat([asked]))
reader = FunctionTool.from_defaults(read_notes)
called = model.chat_with_tools([reader], chat_history=[asked])
(call,) = model.get_tool_calls_from_response(called)
content = str(reader(**call.tool_kwargs).content)
result = ChatMessage(role="tool", content=content, additional_kwargs={"tool_call_id": call.tool_id})
end = model.chat_with_tools([reader], chat_history=[asked, called.message, result])
check_answer(end.message.content)
found = model.as_structured_llm(Notes).complete(QUESTION).raw
assert found == Notes(word="walnut"), found
