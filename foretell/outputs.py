"""What a caller gets back, in the shapes users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .types import FinishReason

if TYPE_CHECKING:
    from .engine.stats import SpeculationStats


@dataclass(frozen=True)
class RequestTimings:
    """Seconds by the wall clock."""

    queue: float  # from asking until the prompt was taken up
    first_token: float  # from asking until the first token
    total: float  # from asking until the end

    @property
    def decode(self) -> float:
        """From the first token to the last."""
        return self.total - self.first_token


@dataclass(frozen=True)
class Logprob:
    """How likely the model itself found a token, before any setting of the request."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    speculation: SpeculationStats
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: itself and the likeliest


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. `speculation` is summed over the outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    speculation: SpeculationStats
    timings: RequestTimings
    cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
