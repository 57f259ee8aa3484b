"""LangChain: OpenAI's, Anthropic's and Ollama's API, each with a stream, a bound tool and structured output."""

from __future__ import annotations

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from task import MODEL, QUESTION, URL, check_answer, check_stream, read_notes


class Notes(BaseModel):
    """The notes."""

    word: str


reader = tool(read_notes)
models = (
    ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="any", max_retries=0),
    ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="any", max_retries=0, use_responses_api=True),
    ChatAnthropic(model=MODEL, base_url=URL, api_key="any", max_tokens=400, max_retries=0),
    ChatOllama(model=MODEL, base_url=URL),
)
for model in models:
    check_answer(model.invoke(QUESTION).text)
    check_stream(chunk.text for chunk in model.stream(QUESTION))
    with_tool = model.bind_tools([reader])
    asked = [HumanMessage(QUESTION)]
    called = with_tool.invoke(asked)
    (call,) = called.tool_calls
    result = ToolMessage(reader.invoke(call["args"]), tool_call_id=call["id"], name=call["name"])
    check_answer(with_tool.invoke([*asked, called, result]).text)
    for method in ("function_calling", "json_schema"):
        found = model.with_structured_output(Notes, method=method).invoke(QUESTION)
        assert found == Notes(word="walnut"), (model, method, found)
