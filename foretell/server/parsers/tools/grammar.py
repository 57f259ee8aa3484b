"""Grammars that force or allow tool calls in the format of a tool parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.errors import RequestError
from foretell.server.openai.chat_requests import FunctionDefinition
from foretell.structured_output import ONE_LINE, GrammarSpec

from .arguments import is_text
from .hermes import END_TAG, START_TAG


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


@dataclass(frozen=True)
class TaggedFormat:
    """The text around the parts of a call; `{}` stands for a name."""

    call: str
    argument: str
    end_argument: str
    end_call: str


QWEN3_CODER = TaggedFormat(
    call="<tool_call>\n<function={}>\n",
    argument="<parameter={}>\n",
    end_argument="\n</parameter>\n",
    end_call="</function>\n</tool_call>",
)
GLM = TaggedFormat(
    call="<tool_call>{}\n",
    argument="<arg_key>{}</arg_key>\n<arg_value>",
    end_argument="</arg_value>\n",
    end_call="</tool_call>",
)


def tagged_calls(form: TaggedFormat) -> Callable[[Sequence[FunctionDefinition], bool], str]:
    """Return a function that returns the Lark rules of calls in this format."""

    def rules(functions: Sequence[FunctionDefinition], parallel: bool) -> str:
        more = r' ("\n" call)*' if parallel else ""
        lines = [f"start: call{more}", "call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            lines += _call_rules(form, f"call{i}", function)
        lines.append(f"words[suffix={json.dumps(form.end_argument)}]: /(?s:.*)/")
        return "\n".join(lines) + "\n"

    return rules


def _call_rules(form: TaggedFormat, name: str, function: FunctionDefinition) -> list[str]:
    """Return the rule of one function's call, and those of its arguments in the order of the schema."""
    schema = function.parameters or {}
    properties, required = schema.get("properties"), schema.get("required")
    parts, lines = [json.dumps(form.call.format(function.name))], []
    for j, (key, value) in enumerate((properties if isinstance(properties, Mapping) else {}).items()):
        rule = f"{name}a{j}"
        parts.append(rule if isinstance(required, list) and key in required else f"{rule}?")
        opening = json.dumps(form.argument.format(key))
        lines += _argument_rules(form, rule, opening, value, schema)
    parts.append(json.dumps(form.end_call))
    return [f"{name}: {' '.join(parts)}", *lines]


def _argument_rules(form: TaggedFormat, rule: str, opening: str, value: Any, schema: Mapping[str, Any]) -> list[str]:
    end = json.dumps(form.end_argument)
    if not is_text(value):
        whole = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        whole |= value if isinstance(value, Mapping) else {}
        body = json.dumps(whole | {"x-guidance": ONE_LINE}, ensure_ascii=False)
        return [f"{rule}: {opening} {rule}v {end}", f"{rule}v: %json {body}"]
    options = value.get("enum") or ([value["const"]] if isinstance(value.get("const"), str) else None)
    if options:
        return [f"{rule}: {opening} ({' | '.join(json.dumps(str(option)) for option in options)}) {end}"]
    return [f"{rule}: {opening} words"]


FORMATS: dict[str, Callable[[Sequence[FunctionDefinition], bool], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen3_coder": tagged_calls(QWEN3_CODER),
    "glm": tagged_calls(GLM),
}
