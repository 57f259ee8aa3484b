"""Token counts, timings and speculation statistics of a response, in the shapes of OpenAI, llama.cpp and vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .choice_state import ChoiceState

if TYPE_CHECKING:
    from foretell.engine.sequence_state import SequenceState
    from foretell.types import Request

PREDICTION = "prediction"  # the drafter of OpenAI's predicted outputs


def usage(choices: Sequence[ChoiceState], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return OpenAI's `usage`. A prompt counts once however many choices it has."""
    prompts = {choice.request.id: choice for choice in reversed(choices)}.values()
    num_prompt = sum(len(choice.request.prompt) for choice in prompts)
    num_completion = sum(len(choice.tokens) for choice in choices)
    details: dict[str, int] = {"reasoning_tokens": reasoning_tokens}
    if any(_brings_prediction(choice.request) for choice in choices):
        drafted, accepted = _draft_counts(choices, PREDICTION)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(_cached_tokens(choice) for choice in prompts)},
        "completion_tokens_details": details,
    }


def _brings_prediction(request: Request) -> bool:
    return bool(request.prediction) and not request.speculation.prediction_is_inferred


def _cached_tokens(choice: ChoiceState) -> int:
    return 0 if choice.state is None else choice.state.cached_prompt_tokens


def _draft_counts(choices: Sequence[ChoiceState], drafter: str) -> tuple[int, int]:
    """Return the draft tokens of one drafter and how many of them were accepted."""
    counts = [choice.state.speculation.by_drafter.get(drafter) for choice in choices if choice.state is not None]
    known = [count for count in counts if count is not None]
    return sum(count.drafted for count in known), sum(count.accepted for count in known)


def timings(choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """Return llama.cpp's `timings`: milliseconds of prefill and decode, and draft counts if drafting was allowed."""
    states = [choice.state for choice in choices if choice.state is not None]
    prefill, decode = _prefill_seconds(states), _decode_seconds(states)
    counts = usage(choices)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    prompt, predicted = counts["prompt_tokens"] - cached, counts["completion_tokens"]
    decoded = max(0, predicted - len(choices))  # the first token of each choice comes with the prefill
    fields = {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prefill * 1000,
        "prompt_per_token_ms": _ratio(prefill * 1000, prompt),
        "prompt_per_second": _ratio(prompt, prefill),
        "predicted_n": predicted,
        "predicted_ms": decode * 1000,
        "predicted_per_token_ms": _ratio(decode * 1000, decoded),
        "predicted_per_second": _ratio(decoded, decode),
    }
    if any(choice.may_draft for choice in choices):
        fields["draft_n"] = sum(choice.drafted for choice in choices)
        fields["draft_n_accepted"] = sum(choice.accepted for choice in choices)
    return fields


def prompt_progress(choice: ChoiceState) -> dict[str, Any]:
    """Return llama.cpp's `prompt_progress`. It is sent with the first token, when the whole prompt is processed."""
    states = [] if choice.state is None else [choice.state]
    total = len(choice.request.prompt)
    return {
        "total": total,
        "cache": _cached_tokens(choice),
        "processed": total,
        "time_ms": round(_prefill_seconds(states) * 1000, 3),
    }


def _prefill_seconds(states: Sequence[SequenceState]) -> float:
    times = [state.timings for state in states]
    return max((t.first_token - t.started for t in times if t.first_token and t.started), default=0.0)


def _decode_seconds(states: Sequence[SequenceState]) -> float:
    """Return the time from the first token of all choices to the last one, or to now while they are generated."""
    firsts = [state.timings.first_token for state in states if state.timings.first_token is not None]
    lasts = [state.timings.finished or perf_counter() for state in states]
    return max(lasts) - min(firsts) if firsts else 0.0


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0


def spec_metrics(choices: Sequence[ChoiceState], max_draft: int, detailed: bool) -> dict[str, Any] | None:
    """Return vLLM's `metrics`, summed over the choices; None if drafting was not allowed.

    `max_draft` is the server's longest draft; `detailed` adds the counts of every step.
    """
    if not any(choice.may_draft for choice in choices):
        return None
    steps = [step for choice in choices for step in choice.draft_steps]
    drafted, accepted = sum(choice.drafted for choice in choices), sum(choice.accepted for choice in choices)
    fields: dict[str, Any] = {
        "mean_acceptance_length": 1 + _ratio(accepted, len(steps)),
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": _histogram([a for _, a in steps], max_draft),
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max_draft,
    }
    if detailed:
        lengths = sorted({d for d, _ in steps})
        fields["acceptance_histogram_by_draft_length"] = {
            str(length): _histogram([a for d, a in steps if d == length], length) for length in lengths
        }
        fields["per_step_accepted"] = [a for _, a in steps]
        fields["per_step_drafted"] = [d for d, _ in steps]
    return {"speculative_decoding": fields}


def _histogram(accepted: list[int], max_draft: int) -> list[int]:
    """Return the number of steps by accepted draft tokens, from 0 to at least `max_draft`."""
    counts = Counter(accepted)
    return [counts[i] for i in range(max(max_draft, *counts, 0) + 1)]


def speculation(choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """Return our own `speculation`: rule, losslessness, seeds, counts by drafter, and why steps had no draft."""
    states = [choice.state for choice in choices if choice.state is not None]
    drafters = sorted({name for state in states for name in state.speculation.by_drafter})
    return {
        "rule": choices[0].request.rule,
        "lossless": all(state.speculation.lossless for state in states),
        "seeds": [choice.request.seed for choice in choices],
        "drafters": {
            name: dict(zip(("drafted", "accepted"), _draft_counts(choices, name), strict=True)) for name in drafters
        },
        "skipped": dict(sum((choice.skipped for choice in choices), Counter())),
    }
