"""instructor: structured output by tools, which is its default, and by JSON schemas, streamed and not."""

from __future__ import annotations

import instructor
from openai import OpenAI
from pydantic import BaseModel
from task import MODEL, QUESTION, URL


class Notes(BaseModel):
    """The notes."""

    word: str


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="any", max_retries=0), mode=mode)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}
    assert client.chat.completions.create(response_model=Notes, **asked).word == "walnut", mode
    parts = list(client.chat.completions.create_partial(response_model=Notes, **asked))
    assert parts[-1].word == "walnut", (mode, parts)
