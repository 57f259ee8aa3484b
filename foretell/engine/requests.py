"""From what a caller asks to requests in which everything is settled, or a refusal in words."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from foretell.errors import RequestError
from foretell.sampling.noise import mix
from foretell.types import DEFAULT_MAX_TOKENS, Request, SamplingParams, SpeculationChoice


@dataclass(frozen=True)
class Limits:
    """What the model sets for every request."""

    context: int
    end_ids: frozenset[int]


def make_requests(
    request_id: str,
    prompt: list[int],
    params: SamplingParams,
    limits: Limits,
    speculation: SpeculationChoice = SpeculationChoice(),
    tenant: str = "",
) -> list[Request]:
    """One request for each of `n` choices; they differ by their noise alone."""
    max_tokens = settle_max_tokens(prompt, params, limits.context)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return [
        Request(
            request_id,
            tuple(prompt),
            params,
            mix(seed, choice),
            max_tokens,
            limits.end_ids,
            choice,
            tenant,
            speculation,
        )
        for choice in range(params.n)
    ]


def settle_max_tokens(prompt: list[int], params: SamplingParams, context: int) -> int:
    """How many tokens may be written; what cannot fit is refused before any is made."""
    if not prompt:
        raise RequestError("prompt", "is empty; give it some text")
    room = context - len(prompt)
    if room < 1:
        raise RequestError(
            "prompt", f"has {len(prompt)} tokens; this model takes at most {context - 1} and one new one; shorten it"
        )
    if params.max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if params.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"{params.max_tokens} is more than the {room} tokens left after the prompt; ask for {room} or fewer",
        )
    return params.max_tokens
