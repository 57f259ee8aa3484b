"""The content blocks and choices of Anthropic's API for the OpenAPI schema, as `requests.py` checks them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from foretell.server.anthropic.client_tools import CLIENT_TOOLS
from foretell.server.json_schemas import (
    NULL,
    OBJECT,
    TEXT,
    TEXT_PART,
    WITH_TOOLS,
    Schema,
    any_of,
    array,
    given,
    tagged,
    unless,
)

Block = dict[str, Any]

TEXT_BLOCKS = array(TEXT_PART)
RESULT = tagged("tool_result", "tool_use_id", tool_use_id=TEXT, content=any_of(NULL, TEXT, array(OBJECT)))
USER_CONTENT = any_of(TEXT, array(any_of(TEXT_PART, RESULT), minItems=1))
CALL = tagged("tool_use", "id name", id=TEXT, name=TEXT, input=OBJECT)
THOUGHTS = tagged("thinking", "thinking", thinking=TEXT)
# Blocks of other types get a placeholder: an assistant's message comes back as some server wrote it.
OTHER: Schema = {"type": "object", "properties": {"type": {"not": {"enum": ["text", "thinking", "tool_use"]}}}}
ASSISTANT_CONTENT = any_of(NULL, TEXT, array(any_of(TEXT_PART, CALL, THOUGHTS, OTHER)))
CONTENTS = {"user": USER_CONTENT, "assistant": ASSISTANT_CONTENT, "system": any_of(TEXT, TEXT_BLOCKS)}

SystemBlock = Annotated[Block, WithJsonSchema(TEXT_PART)]
# A named tool has a name; a call that is required needs a tool.
NAMED_TOOL = unless({"properties": {"type": {"not": {"const": "tool"}}}}, given(name=TEXT))
IS_FREE: Schema = {"properties": {"tool_choice": any_of(NULL, {"properties": {"type": {"enum": ["auto", "none"]}}})}}
NO_FORMAT: Schema = {
    "properties": {"output_format": NULL, "output_config": any_of(NULL, {"properties": {"format": NULL}})}
}
FORCED_CALL = unless(IS_FREE, {"allOf": [WITH_TOOLS, NO_FORMAT]})


def describe_contents(schema: Schema) -> None:
    """State the content of a message by its role."""
    schema["anyOf"] = [
        {
            "properties": {"role": {"const": role}, "content": each},
            "required": [] if role == "assistant" else ["content"],
        }
        for role, each in CONTENTS.items()
    ]


def describe_tool(schema: Schema) -> None:
    """Require the name of a custom tool; one of Anthropic's has its own, or is left out."""
    client: Schema = {"type": "string", "pattern": f"^({'|'.join(CLIENT_TOOLS)})(_[0-9]{{8}})?$"}
    hosted: Schema = {"type": "string", "not": {"const": "custom"}}
    schema["anyOf"] = [given(name=TEXT), given(type=client), {**given(type=hosted), "not": given(input_schema=OBJECT)}]
    schema["not"] = given(type={"type": "string", "pattern": "^computer(_[0-9]{8})?$"})
