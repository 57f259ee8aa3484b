"""pydantic-ai: an agent over OpenAI's two APIs and Anthropic's, with a tool, a stream and structured output."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from task import MODEL, QUESTION, URL, check_answer, check_stream, read_notes


class Notes(BaseModel):
    """The notes."""

    word: str


async def stream(agent: Agent) -> list[str]:
    async with agent.run_stream(QUESTION) as result:
        return [text async for text in result.stream_text(delta=True, debounce_by=None)]


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="any")
models = (
    OpenAIChatModel(MODEL, provider=openai),
    OpenAIResponsesModel(MODEL, provider=openai),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="any")),
)
for model in models:
    agent = Agent(model)
    check_answer(agent.run_sync(QUESTION).output)
    check_stream(asyncio.run(stream(agent)))
    check_answer(Agent(model, tools=[read_notes]).run_sync(QUESTION).output)
    assert Agent(model, tools=[read_notes], output_type=Notes).run_sync(QUESTION).output == Notes(word="walnut")
    if not isinstance(model, AnthropicModel):
        assert Agent(model, output_type=NativeOutput(Notes)).run_sync(QUESTION).output == Notes(word="walnut")
