"""How a request wants its tokens drawn and guessed, in the engine's own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from foretell.config import MAX_DRAFT
from foretell.errors import RequestError
from foretell.sampling_params import DECIDING, SamplingParams
from foretell.server.openai.requests import Generation, Prediction, Speculative
from foretell.structured_output import GrammarSpec
from foretell.types import SpeculationChoice

from .config import LONGEST_STOP, ServerConfig

T = TypeVar("T")

SAME = (*DECIDING, "n", "skip_special_tokens")  # that mean the same in a body and in `SamplingParams`
OPENAI = {"temperature": 1.0}  # where neither the request nor the model says otherwise


def sampling_params(
    body: Generation, defaults: Mapping[str, Any], config: ServerConfig, grammar: GrammarSpec | None, **settled: Any
) -> SamplingParams:
    """The model's own defaults, what the request says, and what was `with_shipped_heads` from it."""
    given = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    params = SamplingParams(**(OPENAI | dict(defaults) | given | settled), structured_outputs=grammar)
    if params.n > config.max_n:
        raise RequestError("n", f"must be at most {config.max_n} here, not {params.n}")
    if len(params.stop) > config.max_stop or any(len(stop) > LONGEST_STOP for stop in params.stop):
        raise RequestError("stop", f"takes at most {config.max_stop} strings of {LONGEST_STOP} characters")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > config.max_logprobs:
            raise RequestError("logprobs", f"must be at most {config.max_logprobs} here, not {getattr(params, name)}")
    if grammar is not None:
        config.check_grammar(grammar)
    return params


def speculation_choice(body: Generation) -> SpeculationChoice:
    """What a request says of speculation, llama.cpp's dotted names included."""
    wanted = body.speculative
    options = wanted if isinstance(wanted, Speculative) else Speculative(enabled=wanted is not False)
    _check_thresholds(options.n_min, options.p_min)
    _check_thresholds(body.speculative_n_min, body.speculative_p_min)
    max_draft = _one_of("max_draft", options.max_draft, options.n_max, body.speculative_n_max)
    if max_draft is not None and not 0 <= max_draft <= MAX_DRAFT:
        raise RequestError("speculative.max_draft", f"must be between 0 and {MAX_DRAFT}, not {max_draft}")
    return SpeculationChoice(
        enabled=options.enabled,
        drafter=_one_of("drafter", options.drafter, options.method),
        max_draft=max_draft,
        deadline=options.deadline,
        min_tokens_per_second=options.min_tokens_per_second,
        rule=options.rule,
        acceptance_threshold=_thresholds(options),
        workload=options.workload,
        prediction=None if body.prediction is None else _prediction_text(body.prediction),
        details=bool(body.return_token_details),
    )


def _check_thresholds(n_min: int | None, p_min: float | None) -> None:
    """They say which guesses are worth checking, which is measured here, and change no text."""
    if n_min is not None and not 0 <= n_min <= MAX_DRAFT:
        raise RequestError("speculative.n_min", f"must be between 0 and {MAX_DRAFT}, not {n_min}")
    if p_min is not None and not 0 <= p_min <= 1:
        raise RequestError("speculative.p_min", f"must be between 0 and 1, not {p_min}")


def _one_of(name: str, *values: T | None) -> T | None:
    """The one that is given; two that differ are refused."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise RequestError(f"speculative.{name}", "is given twice and differs; give it once")
    return given[0] if given else None


def _thresholds(options: Speculative) -> tuple[float, float] | None:
    upper, lower = options.acceptance_threshold, options.acceptance_threshold_lower
    if upper is None and lower is None:
        return None
    if upper is None or lower is None:
        raise RequestError("speculative.acceptance_threshold", "and acceptance_threshold_lower go together; give both")
    return upper, lower


def _prediction_text(prediction: Prediction) -> str:
    if isinstance(prediction.content, str):
        return prediction.content
    parts = [part.get("text") for part in prediction.content]
    if not all(isinstance(part, str) for part in parts):
        raise RequestError("prediction.content", "must be a text, or parts of type text")
    return "".join(str(part) for part in parts)
