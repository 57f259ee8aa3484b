"""The grammar a request's answer must follow, in whichever words it was asked for."""

from __future__ import annotations

import json
import re

from foretell.errors import RequestError
from foretell.server.openai.requests import Generation, ResponseFormat, StructuredOutputs
from foretell.server.parsers.reasoning import CLOSES
from foretell.structured_output import GrammarSpec


def grammar_of(body: Generation) -> GrammarSpec | None:
    """What `response_format`, `structured_outputs` or a `guided_` field asks for; more than one of them is refused."""
    found = {
        "response_format": _format(body.response_format),
        "structured_outputs": _structured(body.structured_outputs),
        "guided_json": None if body.guided_json is None else GrammarSpec.json_schema(body.guided_json),
        "guided_regex": None if body.guided_regex is None else GrammarSpec.regex(body.guided_regex),
        "guided_choice": None if body.guided_choice is None else GrammarSpec.choice(body.guided_choice),
        "guided_grammar": None if body.guided_grammar is None else GrammarSpec.lark(body.guided_grammar),
    }
    given = [name for name, spec in found.items() if spec is not None]
    if len(given) > 1:
        raise RequestError(given[1], f"and {given[0]} both say what the answer must look like; give one")
    return found[given[0]] if given else None


def _format(wanted: ResponseFormat | None) -> GrammarSpec | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec.json_object()
    if wanted.json_schema is None:
        raise RequestError("response_format.json_schema", "is missing; give it a schema, or ask for json_object")
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


def behind_thoughts(spec: GrammarSpec) -> GrammarSpec:
    """The same for an answer that begins inside a <think> passage: free words, the mark, then what must follow."""
    if spec.kind == "lark":
        raise RequestError(
            OWN,
            "the template lets the model think first, which a grammar of one's own must allow for; write "
            "the passage into the grammar and use /v1/completions, or turn thinking off in chat_template_kwargs",
        )
    return GrammarSpec.lark(f"start: {THOUGHTS} answer\n{PASSAGE}answer: {_rule(spec)}\n")


def or_calls(spec: GrammarSpec, calls: str, thinking: bool) -> GrammarSpec:
    """The same for an answer that may be calls of tools instead; `calls` is a Lark grammar of them."""
    if spec.kind == "lark":
        raise RequestError(
            OWN,
            "leaves no room for calls of tools; leave tools out, or use /v1/completions and a grammar with both",
        )
    passage, first = (PASSAGE, THOUGHTS) if thinking else ("", "")
    written = calls.replace("start:", "calls:", 1)
    return GrammarSpec.lark(f"start: {first} (calls | answer)\n{passage}{written}answer: {_rule(spec)}\n")


OWN = "structured_outputs.grammar"  # the field with a grammar of the caller's own
THOUGHTS = "thoughts blanks"
BARE_SLASH = re.compile(r"\\.|/", re.DOTALL)  # escapes are matched too, so that `\/` is not escaped twice
PASSAGE = f"thoughts[suffix={json.dumps(CLOSES)}]: /(?s:.*)/\nblanks: /[\\n ]{{0,4}}/\n"


def _rule(spec: GrammarSpec) -> str:
    """A spec as the body of a rule in a larger grammar."""
    match spec.kind:
        case "json_schema" | "json_object":
            return "%json " + json.dumps(spec.bounded_schema(), ensure_ascii=False)
        case "regex":
            return "/" + BARE_SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], spec.text) + "/"
        case "choice":
            return " | ".join(map(json.dumps, spec.choices))
    raise AssertionError("a grammar of the caller's own is no rule of another")
