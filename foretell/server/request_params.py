"""Translates the fields of a request for the engine: sampling parameters, speculation settings, and the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from foretell.config import MAX_DRAFT
from foretell.errors import RequestError
from foretell.sampling_params import DECIDING, SamplingParams
from foretell.server.config import MAX_STOP_CHARS, ServerConfig
from foretell.server.openai.requests import (
    GenerationRequest,
    ResponseFormat,
    Speculative,
    StructuredOutputs,
)
from foretell.structured_output import GrammarSpec
from foretell.types import SpeculationChoice

T = TypeVar("T")

SHARED_PARAMS = (*DECIDING, "n", "skip_special_tokens")  # request fields with the same name in `SamplingParams`
OPENAI_DEFAULTS = {"temperature": 1.0}  # used if neither the request nor the model's generation config sets it


def sampling_params(
    body: GenerationRequest,
    defaults: Mapping[str, Any],
    config: ServerConfig,
    grammar: GrammarSpec | None,
    **overrides: Any,
) -> SamplingParams:
    """Build the sampling parameters from OpenAI's defaults, the model's `defaults`, the request and `overrides`."""
    given = {name: value for name in SHARED_PARAMS if (value := getattr(body, name)) is not None}
    params = SamplingParams(**(OPENAI_DEFAULTS | dict(defaults) | given | overrides), structured_outputs=grammar)
    if params.n > config.max_n:
        raise RequestError("n", f"must be at most {config.max_n} here, not {params.n}")
    if len(params.stop) > config.max_stop or any(len(stop) > MAX_STOP_CHARS for stop in params.stop):
        raise RequestError("stop", f"takes at most {config.max_stop} strings of {MAX_STOP_CHARS} characters")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > config.max_logprobs:
            raise RequestError("logprobs", f"must be at most {config.max_logprobs} here, not {getattr(params, name)}")
    if grammar is not None:
        config.check_grammar(grammar)
    return params


def speculation_choice(body: GenerationRequest) -> SpeculationChoice:
    """Build the request's speculation settings, llama.cpp's dotted names included."""
    given = body.speculative
    options = given if isinstance(given, Speculative) else Speculative(enabled=given is not False)
    _check_thresholds(options.n_min, options.p_min)
    _check_thresholds(body.speculative_n_min, body.speculative_p_min)
    max_draft = given_once("speculative.max_draft", options.max_draft, options.n_max, body.speculative_n_max)
    if max_draft is not None and not 0 <= max_draft <= MAX_DRAFT:
        raise RequestError("speculative.max_draft", f"must be between 0 and {MAX_DRAFT}, not {max_draft}")
    return SpeculationChoice(
        enabled=options.enabled,
        drafter=given_once("speculative.drafter", options.drafter, options.method),
        max_draft=max_draft,
        deadline=options.deadline,
        min_tokens_per_second=options.min_tokens_per_second,
        rule=options.rule,
        acceptance_threshold=_acceptance_thresholds(options),
        workload=options.workload,
        prediction=None if body.prediction is None else body.prediction.expected,
        details=bool(body.return_token_details),
    )


def _check_thresholds(n_min: int | None, p_min: float | None) -> None:
    """Check llama.cpp's draft thresholds. They have no effect: the controller measures which drafts are worth it."""
    if n_min is not None and not 0 <= n_min <= MAX_DRAFT:
        raise RequestError("speculative.n_min", f"must be between 0 and {MAX_DRAFT}, not {n_min}")
    if p_min is not None and not 0 <= p_min <= 1:
        raise RequestError("speculative.p_min", f"must be between 0 and 1, not {p_min}")


def given_once(name: str, *values: T | None) -> T | None:
    """Return the value of a field with several names; reject two values that differ."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise RequestError(name, "is given twice with different values; give it once")
    return given[0] if given else None


def _acceptance_thresholds(options: Speculative) -> tuple[float, float] | None:
    upper, lower = options.acceptance_threshold, options.acceptance_threshold_lower
    if upper is None and lower is None:
        return None
    if upper is None or lower is None:
        raise RequestError("speculative.acceptance_threshold", "and acceptance_threshold_lower go together; give both")
    return upper, lower


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


BARE_SLASH = re.compile(r"\\.|/", re.DOTALL)  # matches escapes too, so that `\/` is not escaped twice


def rule_body(spec: GrammarSpec) -> str:
    """Return a spec as the body of a Lark rule."""
    match spec.kind:
        case "json_schema" | "json_object":
            return "%json " + json.dumps(spec.bounded_schema(), ensure_ascii=False)
        case "regex":
            return "/" + BARE_SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], spec.text) + "/"
        case "choice":
            return " | ".join(map(json.dumps, spec.choices))
    raise AssertionError("a Lark grammar cannot be a rule of another grammar")
