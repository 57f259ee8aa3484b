"""Grammars that force or allow tool calls in the format of a tool parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from foretell.errors import RequestError
from foretell.server.openai.chat_requests import FunctionDefinition
from foretell.structured_output import ONE_LINE, GrammarSpec

from .hermes import END_TAG, START_TAG
from .tagged_grammar import GLM, QWEN3_CODER, tagged_calls


def forced_call_grammar(tool_parser: str, functions: Sequence[FunctionDefinition], parallel: bool) -> GrammarSpec:
    """Return a grammar of output that calls one of the functions, or several if `parallel`."""
    return GrammarSpec.lark(calls_grammar(tool_parser, functions, parallel))


def calls_grammar(tool_parser: str, functions: Sequence[FunctionDefinition], parallel: bool) -> str:
    """Return the Lark rules of the calls, for use in a larger grammar."""
    if tool_parser not in FORMATS:
        raise RequestError(
            "tool_choice", f"calls of the format {tool_parser} cannot be forced, and exclude other formats; use auto"
        )
    return FORMATS[tool_parser](functions, parallel)


def strict_call_grammar(tool_parser: str, functions: Sequence[FunctionDefinition]) -> GrammarSpec:
    """Return a grammar of free text with tool calls anywhere, whose arguments follow their schemas."""
    if tool_parser != "hermes":
        raise RequestError(
            "tools",
            "strict needs tool_choice required with this model, whose calls have no start tag; or set strict to false",
        )
    from llguidance import StructTag

    tags = [
        StructTag(
            trigger=START_TAG,
            begin=f'{START_TAG}\n{{"name": {json.dumps(function.name)}, "arguments": ',
            grammar=_schema_text(
                function.parameters if function.strict and function.parameters else {"type": "object"}
            ),
            end="}\n" + END_TAG,
        )
        for function in functions
    ]
    return GrammarSpec.lark(StructTag.to_grammar(tags, assume_special=False))


def _hermes(functions: Sequence[FunctionDefinition], parallel: bool) -> str:
    more = r' ("\n" call)*' if parallel else ""
    start, end = json.dumps(START_TAG + "\n"), json.dumps("\n" + END_TAG)
    return (
        f"start: call{more}\ncall: {start} body {end}\nbody: {_json_rule(_any_call_schema(functions, 'arguments'))}\n"
    )


def _llama3(functions: Sequence[FunctionDefinition], parallel: bool) -> str:
    more = ' ("; " call)*' if parallel else ""
    return f"start: call{more}\ncall: {_json_rule(_any_call_schema(functions, 'parameters'))}\n"


def _mistral(functions: Sequence[FunctionDefinition], parallel: bool) -> str:
    """Return the list alone: the tag is a special token, and the parser does not need it."""
    calls = {"type": "array", "items": _any_call_schema(functions, "arguments"), "minItems": 1}
    return f"start: {_json_rule(calls if parallel else calls | {'maxItems': 1})}\n"


FORMATS: dict[str, Callable[[Sequence[FunctionDefinition], bool], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen3_coder": tagged_calls(QWEN3_CODER),
    "glm": tagged_calls(GLM),
}


def _any_call_schema(functions: Sequence[FunctionDefinition], arguments: str) -> dict[str, Any]:
    calls = [_call_schema(function, arguments) for function in functions]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _call_schema(function: FunctionDefinition, arguments: str) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _json_rule(schema: dict[str, Any]) -> str:
    return "%json " + _schema_text(schema)


def _schema_text(schema: dict[str, Any]) -> str:
    """Return the schema as JSON, with whitespace restricted to one line as in training data."""
    return json.dumps(schema | {"x-guidance": ONE_LINE}, ensure_ascii=False)
