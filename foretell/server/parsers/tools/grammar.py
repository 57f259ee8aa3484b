"""Grammars that force or allow tool calls in the format of a tool parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from foretell.server.openai.chat_requests import FunctionDefinition

from .gemma import FunctionGemmaParser, Gemma4Parser
from .gemma_grammar import gemma_call
from .harmony import CHANNEL, CONSTRAIN, MESSAGE
from .hermes import END_TAG, START_TAG
from .lark import LarkTokens, json_rule
from .mistral import ARGS
from .mistral import TAG as MISTRAL_TAG
from .tagged_grammar import GLM, QWEN3_CODER, tagged_call

CallRules = Callable[[Sequence[FunctionDefinition], LarkTokens], str]
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: a start tag and the rules `call` of what follows it."""

    start: str  # "" if a call has no start tag
    call: CallRules
    between: str | None = ""  # text between two calls; None if a turn has one
    always_starts: bool = True  # whether a forced call has the start tag even if it is no special token


def calls_rules(form: CallFormat, functions: Sequence[FunctionDefinition], parallel: bool, tokens: LarkTokens) -> str:
    """Return the rules `calls` of one call of the functions, or of several if `parallel`."""
    start = form.start if form.always_starts or tokens.has(form.start) else ""
    one = f"{tokens.text(start)} call"
    more = f" ({tokens.text(form.between)} {one})*" if parallel and form.between is not None else ""
    return f"calls: {one}{more}\n{form.call(functions, tokens)}"


def strict_rules(form: CallFormat, functions: Sequence[FunctionDefinition], tokens: LarkTokens) -> str | None:
    """Return the rules `strict` of free text with calls anywhere, whose arguments follow the schemas of strict ones.

    None without a start tag: nothing tells then where a call starts.
    """
    if not form.start:
        return None
    wanted = [function if function.strict else _with_any_arguments(function) for function in functions]
    return (
        f"strict: (called call)* uncalled\nuncalled: /(?s:.*)/\n"
        f"{tokens.trigger('called', form.start)}{form.call(wanted, tokens)}"
    )


def _with_any_arguments(function: FunctionDefinition) -> FunctionDefinition:
    return function.model_copy(update={"parameters": ANY_ARGUMENTS})


def json_call(before: str, after: str, end: str = "") -> CallRules:
    """Return the rules of calls that are a name between two texts, the arguments as JSON, and an end."""

    def rules(functions: Sequence[FunctionDefinition], tokens: LarkTokens) -> str:
        lines = ["call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            lines.append(f"call{i}: {tokens.text(before + function.name + after)} arguments{i} {tokens.text(end)}")
            lines.append(f"arguments{i}: {json_rule(function.parameters or ANY_ARGUMENTS)}")
        return "\n".join(lines) + "\n"

    return rules


def _objects(functions: Sequence[FunctionDefinition], tokens: LarkTokens) -> str:
    return f"call: {json_rule(_call_schema(functions, 'parameters'))}\n"


def _list_of_calls(functions: Sequence[FunctionDefinition], tokens: LarkTokens, parallel: bool = True) -> str:
    call = _call_schema(functions, "arguments")
    calls = {"type": "array", "items": call, "minItems": 1, "$defs": call.pop("$defs")}
    return f'call: " "? list\nlist: {json_rule(calls if parallel else calls | {"maxItems": 1})}\n'


def _call_schema(functions: Sequence[FunctionDefinition], arguments: str) -> dict[str, Any]:
    """Return the schema of a call as one JSON object; a name that is text of the grammar would look like JSON.

    The schemas of the arguments are definitions of it, and so are their own definitions.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, arguments: {"$ref": f"#/$defs/f{i}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]
    definitions = {
        f"f{i}": _moved(function.parameters or ANY_ARGUMENTS, f"#/$defs/f{i}") for i, function in enumerate(functions)
    }
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself are right at another place."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    moved = {name: _moved(value, place) for name, value in schema.items()}
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


MISTRAL_LIST = CallFormat(MISTRAL_TAG, _list_of_calls, None, always_starts=False)
MISTRAL_SINGLE = CallFormat(MISTRAL_TAG, partial(_list_of_calls, parallel=False), None, always_starts=False)
MISTRAL_NAMED = CallFormat(MISTRAL_TAG, json_call("", ARGS))
HARMONY_HEADER = f"{CHANNEL}commentary to=functions."
FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat(START_TAG, json_call('\n{"name": "', '", "arguments": ', "}\n" + END_TAG), "\n"),
    "llama3": CallFormat("", _objects, "; "),
    "qwen3_coder": CallFormat(START_TAG, partial(tagged_call, QWEN3_CODER), "\n"),
    "glm": CallFormat(START_TAG, partial(tagged_call, GLM), "\n"),
    "gemma4": CallFormat(Gemma4Parser.start_tag, partial(gemma_call, Gemma4Parser)),
    "functiongemma": CallFormat(FunctionGemmaParser.start_tag, partial(gemma_call, FunctionGemmaParser)),
    "harmony": CallFormat("", json_call(HARMONY_HEADER, f" {CONSTRAIN}json{MESSAGE}"), None),
}


def call_format(tool_parser: str, template: str | None, parallel: bool) -> CallFormat:
    """Return the format of the calls that a tool parser reads; Mistral's templates tell which of two they use."""
    if tool_parser != "mistral":
        return FORMATS[tool_parser]
    if ARGS in (template or ""):
        return MISTRAL_NAMED
    return MISTRAL_LIST if parallel else MISTRAL_SINGLE
