"""Random requests with their plain output, and every drafter to attack it with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.predicted_output import PredictedOutputDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.engine.engine import Engine
from foretell.engine.sequence_state import SequenceState
from foretell.types import Budget, Draft, Sequence, SpeculationChoice, TokenLogprob
from tests.laws import test_losslessness as laws
from tests.tiny import HEADS, VOCAB, OwnHead, World, add, run

Key = tuple[str, int]  # a request id and one of its choices
MOST_PROMPT, MOST_TOKENS = 14, 32  # short prompts are admitted together, and grow until pages run out
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "logprobs": 3},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "logprobs": 0},
    {"temperature": 1.0, "stop_token_ids": [7, 8], "ignore_eos": True},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "logprobs": 1},
    {"logit_bias": {5: 3.0, 9: -2.0}, "temperature": 0.5},
    {"min_tokens": 9, "temperature": 1.0},
    {"allowed_token_ids": list(range(0, VOCAB, 2)), "temperature": 1.0, "logprobs": 2},
    {"n": 2, "temperature": 0.8, "logprobs": 1},
)


@dataclass(frozen=True)
class Plain:
    """What plain decoding alone gives for one choice of a request."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: dict[int, TokenLogprob]


@dataclass(frozen=True)
class Asked:
    """A random request."""

    name: str
    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any]
    speculation: SpeculationChoice

    def add(self, engine: Engine, prediction: list[int]) -> list[SequenceState]:
        more = self.sampling | {"max_tokens": self.max_tokens, "prediction": prediction}
        return add(engine, self.name, self.prompt, self.speculation, **more)


Truth = dict[Key, Plain]


@cache
def requests(seed: int, count: int) -> tuple[tuple[Asked, ...], Truth]:
    """Return random requests, many of which share a prefix or repeat themselves, and their plain output."""
    rng, found, truth = random.Random(seed), list[Asked](), Truth()
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (0, 4, 8)]
    engine = World(prefix_cache=False).engine()
    for i in range(count):
        tail = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 4))] * rng.randrange(1, 3)
        choice = SpeculationChoice(enabled=rng.random() < 0.95, max_draft=rng.choice([None, None, 1, 3]))
        sampling = {"ignore_eos": rng.random() < 0.8, **rng.choice(SAMPLING)}  # long outputs fill the cache
        most = rng.randrange(16, MOST_TOKENS + 1)
        asked = Asked(str(i), rng.choice(prefixes) + tail, most, sampling, choice)
        tracks = asked.add(engine, [])
        run(engine)
        truth |= {key(track): _plain(track) for track in tracks}
        found.append(asked)
    return tuple(found), truth


def key(track: SequenceState) -> Key:
    return track.seq.request.id, track.seq.request.choice


def _plain(track: SequenceState) -> Plain:
    return Plain(track.seq.tokens[len(track.seq.request.prompt) :], track.logprobs, track.prompt_logprobs)


def spoiled(tokens: list[int], error_rate: float) -> list[int]:
    rng = random.Random(len(tokens))
    return [(token + (rng.random() < error_rate)) % VOCAB for token in tokens]


def oracle(truth: Truth, error_rate: float, branches: bool = False) -> ScriptedDrafter:
    """Return a drafter that knows the output and errs; with `branches` the right token is the second sibling."""
    known = {each: spoiled(plain.tokens, error_rate) for each, plain in truth.items()}

    def propose(seq: Sequence, budget: Budget) -> Draft:
        right = known[seq.request.id, seq.request.choice][seq.num_output_tokens :]
        if not branches:
            return Draft.chain(right[: budget.nodes], "scripted")
        tokens: list[int] = []
        parents: list[int] = []
        for token in right[: budget.nodes // 2]:
            parents += [len(tokens) - 1] * 2
            tokens += [(token + 1) % VOCAB, token]
        return Draft(tuple(tokens), tuple(parents), "scripted")

    return ScriptedDrafter(propose)


def heads_and_others(truth: Truth) -> MixDrafter:
    heads = [OwnHead(HEADS["eagle"], packed=True), OwnHead(HEADS["block"])]
    return MixDrafter([*heads, SuffixDrafter(), oracle(truth, 0.3)])


KNOWING = ("oracle", "oracle that errs", "always wrong", "tree around the output")  # need other arguments here
DRAFTERS: dict[str, Callable[[Truth], Drafter]] = {
    "none": lambda truth: MixDrafter([]),
    "prediction": lambda truth: PredictedOutputDrafter(),
    "oracle": lambda truth: oracle(truth, 0.0),
    "oracle that errs": lambda truth: oracle(truth, 0.3),
    "tree around the output": lambda truth: oracle(truth, 0.2, branches=True),
    "mix of heads": heads_and_others,
    **{name: lambda truth, make=make: make([]) for name, make in laws.DRAFTERS.items() if name not in KNOWING},  # type: ignore[misc]
    **{f"head: {name}": lambda truth, c=config: OwnHead(c) for name, config in HEADS.items()},
    **{f"packed head: {name}": lambda truth, c=config: OwnHead(c, packed=True) for name, config in HEADS.items()},
}  # fmt: skip
