"""The items, tools and choices of the Responses API for the OpenAPI schema, as they are checked here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from foretell.server.json_schemas import (
    FILLED,
    JSON_SCHEMA,
    NOT_SET,
    NULL,
    OBJECT,
    TEXT,
    TEXT_OR_NULL,
    TOOL_NAME,
    Schema,
    any_of,
    array,
    given,
    record,
    tagged,
    unless,
)
from foretell.server.openai_responses.input_items import ASSISTANT, HOSTED_ITEMS, ROLES, TEXT_PARTS

TEXT_ITEM = record("type text", type={"enum": [*TEXT_PARTS]}, text=TEXT)
PARTS = array(TEXT_ITEM)
CONTENT = any_of(TEXT, PARTS)
HISTORY = any_of(NULL, TEXT, OBJECT, array(any_of(TEXT, OBJECT)))  # what is not text gets a placeholder
IS_MESSAGE: Schema = {"const": "message"}
MESSAGE = any_of(
    record(
        "role content", type=IS_MESSAGE, role={"enum": [role for role in ROLES if role != ASSISTANT]}, content=CONTENT
    ),
    record("role", type=IS_MESSAGE, role={"const": ASSISTANT}, content=HISTORY),
)
OWN_CALLS = (
    tagged("function_call", "call_id name arguments", call_id=TEXT, name=TEXT, arguments=TEXT),
    tagged("custom_tool_call", "call_id name input", call_id=TEXT, name=TEXT, input=TEXT),
)
OTHER_CALL = record("type", type={"pattern": "_call$", "not": {"enum": ["function_call", "custom_tool_call"]}, **TEXT})
RESULT = record("type call_id", type={"pattern": "_call_output$", **TEXT}, call_id=TEXT, output=HISTORY)
SERVED = record("type", type={"enum": [*HOSTED_ITEMS]})
# The summary counts where there is no content.
NOTHING = any_of(
    {"enum": [None, "", 0, False]}, {"maxItems": 0, "type": "array"}, {"maxProperties": 0, "type": "object"}
)
REASONING = any_of(
    tagged("reasoning", "content", content=any_of(FILLED, {**PARTS, "minItems": 1})),
    tagged("reasoning", content=NOTHING, summary=any_of(NOTHING, CONTENT)),
)
Item = Annotated[dict[str, Any], WithJsonSchema(any_of(MESSAGE, *OWN_CALLS, OTHER_CALL, RESULT, SERVED, REASONING))]

PARAMETERS = any_of(NULL, OBJECT)
STRICT: Schema = {"type": ["boolean", "null"]}
FUNCTION = tagged("function", "name", name=TOOL_NAME, description=TEXT_OR_NULL, parameters=PARAMETERS, strict=STRICT)
HOSTED = {**OBJECT, "not": given(type={"const": "function"})}
ToolItem = Annotated[dict[str, Any], WithJsonSchema(any_of(FUNCTION, HOSTED))]
NO_CALL: Schema = {"enum": ["auto", "none", None]}
MODE: Schema = {"enum": ["auto", "required", None]}
CHOICES = (tagged("function", "name", name=TEXT), tagged("allowed_tools", "tools", mode=MODE, tools=array({})))
ToolChoice = Annotated[str | dict[str, Any], WithJsonSchema(any_of({"enum": ["auto", "none", "required"]}, *CHOICES))]
SIMPLE_FORMAT = record(type={"enum": ["text", "json_object", None]})
SCHEMA_FORMAT = tagged("json_schema", "schema", schema=JSON_SCHEMA)
Format = Annotated[dict[str, Any], WithJsonSchema(any_of(SIMPLE_FORMAT, SCHEMA_FORMAT))]
NotSet = Annotated[Any, WithJsonSchema(NOT_SET)]

# Something to answer: a text, items, the system prompt alone, or an earlier response.
SOME_INPUT = any_of(
    given(input=any_of(TEXT, {"type": "array", "minItems": 1})),
    given(instructions=FILLED),
    given(previous_response_id=TEXT),
)
IS_FREE = {"properties": {"tool_choice": any_of(NO_CALL, record(type={"const": "allowed_tools"}, mode=NO_CALL))}}
NO_FORMAT = {"properties": {"text": any_of(NULL, record(format=any_of(NULL, record(type={"enum": ["text", None]}))))}}
FUNCTIONS = given(tools={"type": "array", "contains": record("type", type={"const": "function"})})
FORCED_CALL = unless(IS_FREE, {"allOf": [FUNCTIONS, NO_FORMAT]})
