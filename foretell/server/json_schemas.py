"""Parts of the OpenAPI schema that state what is checked after validation, where an error can say more.

With them the schema is as strict as the checks. What no schema can say is listed in `tests/server/schema_hooks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from foretell.server.config import MAX_STOP_CHARS
from foretell.structured_output import MAX_CHOICE_LENGTH

Schema = dict[str, Any]
MAX_LIST_ENTRIES = 1024  # of a list or map that the sampler goes through in every step

NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
FILLED: Schema = {"type": "string", "minLength": 1}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_.\-]{1,128}$"
TOOL_NAME: Schema = {"type": "string", "pattern": TOOL_NAME_PATTERN}
NOT_SET: Schema = {"enum": [None, False]}
JSON_SCHEMA: Schema = {"anyOf": [OBJECT, {"const": True}]}


def array(items: Schema, **limits: Any) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **limits}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def record(required: str = "", **properties: Schema) -> Schema:
    """Return the schema of an object; `required` names properties, separated by spaces."""
    found: Schema = {"type": "object", "properties": properties}
    return {**found, "required": required.split()} if required else found


def tagged(kind: str, required: str = "", **properties: Schema) -> Schema:
    """Return the schema of an object of this `type`."""
    return record(f"type {required}", type={"const": kind}, **properties)


def given(**properties: Schema) -> Schema:
    """Return what holds for an object that has these properties, with values of these schemas."""
    return {"properties": properties, "required": list(properties)}


def unless(condition: Schema, consequence: Schema) -> Schema:
    """Return what holds for an object that meets `condition`, or else `consequence`."""
    return any_of(condition, consequence)


def also(*rules: Schema) -> Callable[[Schema], None]:
    """Return a function that adds rules to the schema of an object."""

    def add(schema: Schema) -> None:
        schema.setdefault("allOf", []).extend(rules)

    return add


def _refuse_false(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    if schema is False:
        raise ValueError("must be a JSON object, or true for any JSON")
    return schema


def _refuse_reserved(variables: dict[str, Any]) -> dict[str, Any]:
    for name in RESERVED_VARIABLES:
        if name in variables:
            raise ValueError(f"{name} is reserved; set the request field {name} instead")
    return variables


# Names that the engine knows; importing them from there would load torch before the server can answer.
RULES = ("match", "rejection", "block", "confidence", "typical", "ensemble", "auto")
WORKLOADS = ("code", "json", "narrative", "auto")
Rule = Annotated[str, WithJsonSchema({"enum": [*RULES]})]
Workload = Annotated[str, WithJsonSchema({"enum": [*WORKLOADS]})]
Stop = Annotated[str, WithJsonSchema({**FILLED, "maxLength": MAX_STOP_CHARS})]
Choice = Annotated[str, WithJsonSchema({**FILLED, "maxLength": MAX_CHOICE_LENGTH})]
Word = Annotated[str, WithJsonSchema(FILLED)]
# Neither empty nor blank.
Grammar = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"\S"})]
# A part of a content; a later check refuses other parts with a clearer error.
TEXT_PART = record("type text", type={"const": "text"}, text=TEXT)
TextPart = Annotated[dict[str, Any], WithJsonSchema(TEXT_PART)]
# A JSON schema as an object or as JSON text.
SCHEMA_TEXT: Schema = {"type": "string", "pattern": r"^\s*(\{|true\s*$)", "contentMediaType": "application/json"}
SchemaOrText = Annotated[dict[str, Any] | bool | str, WithJsonSchema(any_of(*JSON_SCHEMA["anyOf"], SCHEMA_TEXT))]
SchemaValue = Annotated[dict[str, Any] | bool, AfterValidator(_refuse_false), WithJsonSchema(JSON_SCHEMA)]
SchemaFormat = Annotated[dict[str, Any], WithJsonSchema(tagged("json_schema", "schema", schema=JSON_SCHEMA))]
LogitBias = Annotated[
    dict[str, float],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LIST_ENTRIES,
        }
    ),
]
# Variables of the chat template; the request itself sets these.
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
TemplateVariables = Annotated[
    dict[str, Any],
    AfterValidator(_refuse_reserved),
    WithJsonSchema(
        {"type": "object", "additionalProperties": True, "propertyNames": {"not": {"enum": [*RESERVED_VARIABLES]}}}
    ),
]
EmptyList = Annotated[list[Any], WithJsonSchema({"type": "array", "maxItems": 0})]
EmptyText = Annotated[str, WithJsonSchema({"type": "string", "maxLength": 0})]

# The output has one format at most.
FORMATS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
FREE_TEXT = any_of(NULL, record(type={"const": "text"}))
NO_FORMAT: Schema = {"properties": {**dict.fromkeys(FORMATS, NULL), "response_format": FREE_TEXT}}
ONE_FORMAT = any_of(
    *({"properties": {**NO_FORMAT["properties"], name: {}}} for name in ("response_format", *FORMATS)),
)
# A forced tool call needs tools and excludes a format.
WITH_TOOLS = given(tools=array({}, minItems=1))
FORCED_CALL = unless(
    {"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}}, {"allOf": [WITH_TOOLS, NO_FORMAT]}
)
TOP_LOGPROBS = unless({"properties": {"top_logprobs": {"enum": [None, 0]}}}, given(logprobs={"const": True}))
