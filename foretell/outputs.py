"""The outputs of `LLM`, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .types import FinishReason

if TYPE_CHECKING:
    from .engine.stats import SpeculationStats


@dataclass(frozen=True)
class RequestTimings:
    """Wall-clock times of a request in seconds."""

    queue: float  # from submission until the first step
    first_token: float  # from submission until the first output token
    total: float  # from submission until the last token

    @property
    def decode(self) -> float:
        """Return the time from the first output token to the last."""
        return self.total - self.first_token


@dataclass(frozen=True)
class Logprob:
    """The model's logprob of a token, before any sampling parameter."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    speculation: SpeculationStats
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: itself and the most likely ones


@dataclass(frozen=True)
class RequestOutput:
    """The outputs for one prompt. `speculation` is summed over them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    speculation: SpeculationStats
    timings: RequestTimings
    cached_tokens: int  # prompt tokens found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
