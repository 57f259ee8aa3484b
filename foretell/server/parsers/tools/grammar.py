"""Grammars under which an answer is a call of a tool, written as the model's family writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from foretell.errors import RequestError
from foretell.server.openai.chat_requests import FunctionDefinition
from foretell.structured_output import ONE_LINE, GrammarSpec

from .hermes import CLOSES, OPENS


def forced_call_grammar(family: str, functions: Sequence[FunctionDefinition], several: bool) -> GrammarSpec:
    """An answer that calls one of the functions, or several of them."""
    return GrammarSpec.lark(calls_grammar(family, functions, several))


def calls_grammar(family: str, functions: Sequence[FunctionDefinition], several: bool) -> str:
    """The same as Lark, for a larger grammar."""
    return WRITERS[family](functions, several)


def strict_call_grammar(family: str, functions: Sequence[FunctionDefinition]) -> GrammarSpec:
    """Words without a grammar, and calls whose arguments keep to their schemas, wherever the model makes one."""
    if family != "hermes":
        raise RequestError("tools", "strict needs tool_choice required here, or strict false: calls have no clear mark")
    from llguidance import StructTag

    tags = [
        StructTag(
            trigger=OPENS,
            begin=f'{OPENS}\n{{"name": {json.dumps(function.name)}, "arguments": ',
            grammar=_schema(function.parameters if function.strict and function.parameters else {"type": "object"}),
            end="}\n" + CLOSES,
        )
        for function in functions
    ]
    return GrammarSpec.lark(StructTag.to_grammar(tags, assume_special=False))


def _hermes(functions: Sequence[FunctionDefinition], several: bool) -> str:
    more = r' ("\n" call)*' if several else ""
    opens, closes = json.dumps(OPENS + "\n"), json.dumps("\n" + CLOSES)
    return f"start: call{more}\ncall: {opens} body {closes}\nbody: {_json(_any_call(functions, 'arguments'))}\n"


def _llama3(functions: Sequence[FunctionDefinition], several: bool) -> str:
    more = ' ("; " call)*' if several else ""
    return f"start: call{more}\ncall: {_json(_any_call(functions, 'parameters'))}\n"


def _mistral(functions: Sequence[FunctionDefinition], several: bool) -> str:
    """The list alone: its mark is a special token, and the reader needs none."""
    calls = {"type": "array", "items": _any_call(functions, "arguments"), "minItems": 1}
    return f"start: {_json(calls if several else calls | {'maxItems': 1})}\n"


WRITERS: dict[str, Callable[[Sequence[FunctionDefinition], bool], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}


def _any_call(functions: Sequence[FunctionDefinition], arguments: str) -> dict[str, Any]:
    calls = [_call(function, arguments) for function in functions]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _call(function: FunctionDefinition, arguments: str) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _json(schema: dict[str, Any]) -> str:
    return "%json " + _schema(schema)


def _schema(schema: dict[str, Any]) -> str:
    """Return the schema as text, for calls on one line as in training data."""
    return json.dumps(schema | {"x-guidance": ONE_LINE}, ensure_ascii=False)
