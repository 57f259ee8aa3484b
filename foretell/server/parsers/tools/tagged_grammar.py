"""Grammars of calls whose arguments are text between tags: Qwen3-Coder and GLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretell.server.openai.chat_requests import FunctionDefinition
from foretell.structured_output import ONE_LINE

from .arguments import is_text


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
