"""The grammar of a request's output, from any of the fields that can set it."""

from __future__ import annotations

import json
import re

from foretell.errors import RequestError
from foretell.server.openai.requests import GenerationRequest, ResponseFormat, StructuredOutputs
from foretell.server.parsers.reasoning import END_TAG
from foretell.structured_output import GrammarSpec


def grammar_spec(body: GenerationRequest) -> GrammarSpec | None:
    """Return the grammar set by `response_format`, `structured_outputs` or a `guided_` field; reject more than one."""
    specs = {
        "response_format": _format(body.response_format),
        "structured_outputs": _structured(body.structured_outputs),
        "guided_json": None if body.guided_json is None else GrammarSpec.json_schema(body.guided_json),
        "guided_regex": None if body.guided_regex is None else GrammarSpec.regex(body.guided_regex),
        "guided_choice": None if body.guided_choice is None else GrammarSpec.choice(body.guided_choice),
        "guided_grammar": None if body.guided_grammar is None else GrammarSpec.lark(body.guided_grammar),
    }
    given = [name for name, spec in specs.items() if spec is not None]
    if len(given) > 1:
        raise RequestError(given[1], f"and {given[0]} both set the output format; give one")
    return specs[given[0]] if given else None


def _format(wanted: ResponseFormat | None) -> GrammarSpec | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec.json_object()
    if wanted.json_schema is None:
        raise RequestError("response_format.json_schema", "is missing; add a schema, or use type json_object")
    return GrammarSpec.json_schema(wanted.json_schema.schema_)


def _structured(wanted: StructuredOutputs | None) -> GrammarSpec | None:
    if wanted is None:
        return None
    spaces = not wanted.disable_any_whitespace
    given: list[GrammarSpec] = []
    if wanted.json_ is not None:
        given.append(GrammarSpec.json_schema(wanted.json_, any_whitespace=spaces))
    if wanted.json_object:
        given.append(GrammarSpec.json_object(any_whitespace=spaces))
    if wanted.regex is not None:
        given.append(GrammarSpec.regex(wanted.regex))
    if wanted.choice is not None:
        given.append(GrammarSpec.choice(wanted.choice))
    if wanted.grammar is not None:
        given.append(GrammarSpec.lark(wanted.grammar))
    if len(given) != 1:
        raise RequestError("structured_outputs", "must have one of json, json_object, regex, choice and grammar")
    return given[0]


def after_reasoning(spec: GrammarSpec) -> GrammarSpec:
    """Return a grammar for output that starts inside <think>: free text, the end tag, then `spec`."""
    if spec.kind == "lark":
        raise RequestError(
            LARK_FIELD,
            "cannot follow the reasoning that this chat template starts with; include the reasoning in the grammar and "
            "use /v1/completions, or turn reasoning off in chat_template_kwargs",
        )
    return GrammarSpec.lark(f"start: {REASONING} answer\n{REASONING_RULES}answer: {_rule(spec)}\n")


def or_tool_calls(spec: GrammarSpec, calls: str, in_reasoning: bool) -> GrammarSpec:
    """Return a grammar for output that is tool calls or follows `spec`; `calls` is a Lark grammar of the calls."""
    if spec.kind == "lark":
        raise RequestError(
            LARK_FIELD,
            "cannot be combined with tools; leave tools out, or use /v1/completions and a grammar with both",
        )
    rules, start = (REASONING_RULES, REASONING) if in_reasoning else ("", "")
    call_rules = calls.replace("start:", "calls:", 1)
    return GrammarSpec.lark(f"start: {start} (calls | answer)\n{rules}{call_rules}answer: {_rule(spec)}\n")


LARK_FIELD = "structured_outputs.grammar"  # the request field of a Lark grammar
REASONING = "thoughts blanks"
REASONING_RULES = f"thoughts[suffix={json.dumps(END_TAG)}]: /(?s:.*)/\nblanks: /[\\n ]{{0,4}}/\n"
BARE_SLASH = re.compile(r"\\.|/", re.DOTALL)  # matches escapes too, so that `\/` is not escaped twice


def _rule(spec: GrammarSpec) -> str:
    """Return a spec as the body of a Lark rule."""
    match spec.kind:
        case "json_schema" | "json_object":
            return "%json " + json.dumps(spec.bounded_schema(), ensure_ascii=False)
        case "regex":
            return "/" + BARE_SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], spec.text) + "/"
        case "choice":
            return " | ".join(map(json.dumps, spec.choices))
    raise AssertionError("a Lark grammar cannot be a rule of another grammar")
