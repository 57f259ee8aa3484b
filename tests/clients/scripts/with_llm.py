"""llm: a model from extra-openai-models.yaml, with a stream, tools and a schema."""

from __future__ import annotations

import json
from pathlib import Path

import llm
from task import MODEL, QUESTION, URL, check_answer, check_stream, read_notes

settings = {
    "model_id": "local",
    "model_name": MODEL,
    "api_base": f"{URL}/v1",
    "api_key_name": "local",
    "supports_tools": True,
    "supports_schema": True,
}
llm.user_dir().mkdir(parents=True, exist_ok=True)
Path(llm.user_dir(), "extra-openai-models.yaml").write_text(json.dumps([settings]))
Path(llm.user_dir(), "keys.json").write_text(json.dumps({"local": "any"}))

model = llm.get_model("local")
check_answer(model.prompt(QUESTION, stream=False).text())
check_stream(model.prompt(QUESTION))
chain = model.chain(QUESTION, tools=[read_notes])
check_answer("".join(chain))
schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
assert json.loads(model.prompt(QUESTION, schema=schema).text()) == {"word": "walnut"}
