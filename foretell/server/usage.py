"""What an answer cost and what speculation did for it, in the shapes of OpenAI, llama.cpp and vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .choice_state import ChoiceState

if TYPE_CHECKING:
    from foretell.engine.sequence_state import SequenceState

PREDICTION = "prediction"  # the drafter that copies what the client expects


def usage(answers: Sequence[ChoiceState], reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's `usage`; a prompt counts once however many choices it has."""
    prompts = {answer.request.id: answer for answer in reversed(answers)}.values()
    prompt = sum(len(answer.request.prompt) for answer in prompts)
    completion = sum(len(answer.tokens) for answer in answers)
    details: dict[str, int] = {"reasoning_tokens": reasoning_tokens}
    if any(answer.request.prediction for answer in answers):
        drafted, accepted = _guesses(answers, PREDICTION)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(_cached(answer) for answer in prompts)},
        "completion_tokens_details": details,
    }


def _cached(answer: ChoiceState) -> int:
    return 0 if answer.track is None else answer.track.cached_prompt_tokens


def _guesses(answers: Sequence[ChoiceState], drafter: str) -> tuple[int, int]:
    counts = [answer.track.speculation.by_drafter.get(drafter) for answer in answers if answer.track is not None]
    found = [count for count in counts if count is not None]
    return sum(count.drafted for count in found), sum(count.accepted for count in found)


def timings(answers: Sequence[ChoiceState]) -> dict[str, Any]:
    """llama.cpp's `timings`: milliseconds of prompt and text, and what was drafted, where drafts were allowed."""
    tracks = [answer.track for answer in answers if answer.track is not None]
    read, written = _prompt_seconds(tracks), _decode_seconds(tracks)
    counts = usage(answers)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    prompt, predicted = counts["prompt_tokens"] - cached, counts["completion_tokens"]
    later = max(0, predicted - len(answers))  # the first token of each text comes with the prompt
    found = {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": read * 1000,
        "prompt_per_token_ms": _ratio(read * 1000, prompt),
        "prompt_per_second": _ratio(prompt, read),
        "predicted_n": predicted,
        "predicted_ms": written * 1000,
        "predicted_per_token_ms": _ratio(written * 1000, later),
        "predicted_per_second": _ratio(later, written),
    }
    if any(answer.speculates for answer in answers):
        found["draft_n"] = sum(answer.drafted for answer in answers)
        found["draft_n_accepted"] = sum(answer.accepted for answer in answers)
    return found


def prompt_progress(answer: ChoiceState) -> dict[str, Any]:
    """llama.cpp's: tokens of the prompt, those that were known, those that are done with, and milliseconds. It comes
    with the first token, so that all are."""
    tracks = [] if answer.track is None else [answer.track]
    total = len(answer.request.prompt)
    return {
        "total": total,
        "cache": _cached(answer),
        "processed": total,
        "time_ms": round(_prompt_seconds(tracks) * 1000, 3),
    }


def _prompt_seconds(tracks: Sequence[SequenceState]) -> float:
    spans = [t.timings.first_token - t.timings.started for t in tracks if t.timings.first_token and t.timings.started]
    return max(spans, default=0.0)


def _decode_seconds(tracks: Sequence[SequenceState]) -> float:
    """From the first token of all to the last, or to now where the text goes on."""
    firsts = [track.timings.first_token for track in tracks if track.timings.first_token is not None]
    lasts = [track.timings.finished or perf_counter() for track in tracks]
    return max(lasts) - min(firsts) if firsts else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _steps(answers: Sequence[ChoiceState]) -> list[tuple[int, int]]:
    return [step for answer in answers for step in answer.steps]


def spec_metrics(answers: Sequence[ChoiceState], most: int, detailed: bool) -> dict[str, Any] | None:
    """vLLM's `metrics`, summed over the choices; `most` is the longest draft allowed. None where nobody may guess."""
    if not any(answer.speculates for answer in answers):
        return None
    steps = _steps(answers)
    drafted, accepted = sum(answer.drafted for answer in answers), sum(answer.accepted for answer in answers)
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + _ratio(accepted, len(steps)),
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_histogram": _histogram([a for _, a in steps], most),
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": most,
    }
    if detailed:
        lengths = sorted({d for d, _ in steps})
        found["acceptance_histogram_by_draft_length"] = {
            str(length): _histogram([a for d, a in steps if d == length], length) for length in lengths
        }
        found["per_step_accepted"] = [a for _, a in steps]
        found["per_step_drafted"] = [d for d, _ in steps]
    return {"speculative_decoding": found}


def _histogram(accepted: list[int], most: int) -> list[int]:
    counts = Counter(accepted)
    return [counts[i] for i in range(max(most, *counts, 0) + 1)]


def speculation(answers: Sequence[ChoiceState]) -> dict[str, Any]:
    """Our own: the rule, whether the text is the target's own, the seeds, each drafter's guesses, and why none were."""
    tracks = [answer.track for answer in answers if answer.track is not None]
    drafters = sorted({name for track in tracks for name in track.speculation.by_drafter})
    return {
        "rule": answers[0].request.rule,
        "lossless": all(track.speculation.lossless for track in tracks),
        "seeds": [answer.request.seed for answer in answers],
        "drafters": {
            name: dict(zip(("drafted", "accepted"), _guesses(answers, name), strict=True)) for name in drafters
        },
        "skipped": dict(sum((answer.skipped for answer in answers), Counter())),
    }
