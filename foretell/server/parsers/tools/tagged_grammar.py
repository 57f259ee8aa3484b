"""Lark rules of calls whose arguments are text between tags: the formats of Qwen3-Coder and GLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.server.openai.chat_requests import FunctionDefinition

from .lark import LarkTokens, json_rule
from .schemas import permitted_options, permitted_types, resolved

KEY = r"/[^<>\n]+/"  # of an argument that no schema names


@dataclass(frozen=True)
class TaggedFormat:
    """The text around the parts of a call after its start tag; `{}` stands for a name."""

    call: str
    argument: str
    end_argument: str
    end_call: str


QWEN3_CODER = TaggedFormat(
    call="\n<function={}>\n",
    argument="<parameter={}>\n",
    end_argument="\n</parameter>\n",
    end_call="</function>\n</tool_call>",
)
GLM = TaggedFormat(
    call="{}\n",
    argument="<arg_key>{}</arg_key>\n<arg_value>",
    end_argument="</arg_value>\n",
    end_call="</tool_call>",
)


def tagged_call(form: TaggedFormat, functions: Sequence[FunctionDefinition], tokens: LarkTokens) -> str:
    """Return the rules `call` of one call of any of the functions."""
    lines = ["call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        lines += _call_rules(form, f"call{i}", function, tokens)
    before, _, after = form.argument.partition("{}")
    lines.append(f"named: {tokens.text(before)} key {tokens.text(after)} words\nkey: {KEY}")
    return "\n".join(lines) + "\n" + tokens.until("words", form.end_argument)


def _call_rules(form: TaggedFormat, name: str, function: FunctionDefinition, tokens: LarkTokens) -> list[str]:
    """Return the rule of one function's call, and those of its arguments in the order of the schema."""
    schema = function.parameters or {"properties": {}}
    properties, required = schema.get("properties"), schema.get("required")
    parts, lines = [tokens.text(form.call.format(function.name))], []
    for j, (key, value) in enumerate((properties if isinstance(properties, Mapping) else {}).items()):
        rule = f"{name}a{j}"
        parts.append(rule if isinstance(required, list) and key in required else f"{rule}?")
        opening = tokens.text(form.argument.format(key))
        lines += _argument_rules(form, rule, opening, value, schema, tokens)
    if "properties" not in schema:
        parts.append("named*")
    parts.append(tokens.text(form.end_call))
    return [f"{name}: {' '.join(parts)}", *lines]


def _argument_rules(
    form: TaggedFormat, rule: str, opening: str, value: Any, schema: Mapping[str, Any], tokens: LarkTokens
) -> list[str]:
    """Return the rules of one argument: text if it may be a string, and JSON otherwise."""
    end, types = tokens.text(form.end_argument), permitted_types(value, schema)
    if types is None or "string" not in types:
        whole = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        whole |= value if isinstance(value, Mapping) else {}
        return [f"{rule}: {opening} {rule}v {end}", f"{rule}v: {json_rule(whole)}"]
    options = permitted_options(resolved(value, schema), schema)
    if options is None:
        return [f"{rule}: {opening} words"]
    texts = [option if isinstance(option, str) else json.dumps(option) for option in options]
    return [f"{rule}: {opening} ({' | '.join(map(json.dumps, texts))}) {end}"]
