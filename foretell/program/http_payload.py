"""What a generation is in the words of the server's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from foretell.structured_output import GrammarSpec
from foretell.types import SpeculationChoice

from .settings import DEFAULT_MAX_TOKENS, Settings


def completion_body(prompt: str | list[int], settings: Settings) -> dict[str, Any]:
    """For POST /v1/completions."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": DEFAULT_MAX_TOKENS, **settings.sampling}
    if settings.grammar is not None:
        body["structured_outputs"] = _grammar(settings.grammar)
    return body if settings.speculation is None else body | _speculation(settings.speculation)


def scoring_body(prompt: list[int], token: int) -> dict[str, Any]:
    """How likely one token is behind a prompt, which the server may have in its cache."""
    return {
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0.0,
        "allowed_token_ids": [token],
        "logprobs": 0,
        "ignore_eos": True,
        "speculative": False,
    }


def meta_of(reply: Mapping[str, Any], finish: str) -> dict[str, Any]:
    """What a reply, or the last chunk of one, tells of its text."""
    usage, timings = reply["usage"], reply.get("timings", {})
    return {
        "finish_reason": finish,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "seed": reply["speculation"]["seeds"][0],
        "drafted": timings.get("draft_n", 0),
        "accepted": timings.get("draft_n_accepted", 0),
    }


def _grammar(spec: GrammarSpec) -> dict[str, Any]:
    found: dict[str, Any] = {} if spec.any_whitespace else {"disable_any_whitespace": True}
    match spec.kind:
        case "json_schema":
            return found | {"json": json.loads(spec.text)}
        case "json_object":
            return found | {"json_object": True}
        case "regex":
            return {"regex": spec.text}
        case "choice":
            return {"choice": list(spec.choices)}
        case "lark":
            return {"grammar": spec.text}


def _speculation(choice: SpeculationChoice) -> dict[str, Any]:
    said = {name: value for name, value in asdict(choice).items() if value is not None}
    prediction, thresholds = said.pop("prediction", None), said.pop("acceptance_threshold", None)
    details = {"return_token_details": True} if said.pop("details") else {}
    if thresholds is not None:
        said |= {"acceptance_threshold": thresholds[0], "acceptance_threshold_lower": thresholds[1]}
    body: dict[str, Any] = {"speculative": said, **details}
    return body if prediction is None else body | {"prediction": {"type": "content", "content": prediction}}
