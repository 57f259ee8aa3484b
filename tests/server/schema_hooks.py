"""A check for schemathesis: what the OpenAPI schema allows is accepted, but for what no schema can say."""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

# What a schema cannot state, with the error that says it.
EXCEPTIONS = {
    "the length of the context, in tokens": r"maximum context length|is too long|does not fit|many times as long",
    "that one number is above another": r"min_tokens: \d+ is more than|lower: must be at most upper",
    "a limit beyond 2**53, which tools take for a floating-point number": (
        r"seed: must be (a 64-bit integer|at most 9223372036854775807)"
    ),
    "that two numbers are the same": r"is given twice with different values",
    "which JSON schemas, regular expressions and grammars compile, and allow these tokens": (
        r"structured_outputs\.(json_schema|regex|lark)|the grammar cannot continue"
    ),
    "that a name is one of the request's tools": r"tool_choice: there is no tool|tool_choice: requires a tool call",
    "which drafters the server has": r"drafter: this engine has no|drafter: prediction copies|needs a drafter",
    "which ids are in the vocabulary, for ids that are names": r"logit_bias: has token ids outside",
    "which names are misspelt ones": r"is not known; (did you mean|put it into)",
    "that a model fills no gaps, for an endpoint that does nothing else": r"^input_prefix: needs fill-in-the-middle",
}
NO_INTEGER = re.compile(r"valid (integer|string)$")


@schemathesis.check
def valid_data_is_accepted(ctx: Any, response: Any, case: Any) -> bool | None:
    """Allow a refusal for one of the exceptions alone; a JSON schema takes 1.0 for an integer as well."""
    error = {} if response.status_code != 400 else response.json()["error"]
    message = error if isinstance(error, str) else error.get("message", "")
    if any(re.search(pattern, message) for pattern in EXCEPTIONS.values()):
        return None
    if NO_INTEGER.search(message) and _has_whole_float(case.body):
        return None
    return positive_data_acceptance(ctx, response, case)


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()
