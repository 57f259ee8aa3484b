"""Examines a head that others wrote: whether it is wired to this target as its file says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foretell.errors import ModelError
from foretell.models.draft_heads import BlockHead, DistilledHead, DraftHead, EagleHead, MedusaHead, MtpHead
from foretell.models.draft_heads.dense_attention import DenseBlockAttention, DenseChainAttention
from foretell.runner.batch_layout import pack
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence

TOKENS, LEAST_TOKENS = 64, 16  # written after each beginning
FAIR, POOR = 0.30, 0.10  # of the first guesses right: below the one something is wrong, below the other all is
BETTER = 0.10  # so much more often right is another wiring, not luck
OPENINGS = (
    "The history of bread begins",
    "def read_lines(path):\n",
    "Question: Why is the sky blue?\nAnswer:",
    "Here is a list of five things to pack for a trip:\n1.",
)


@dataclass(frozen=True)
class GeneratedSample:
    """A text that the target wrote, and its states after every layer, [places, layers + 1, width]."""

    tokens: Tensor
    states: Tensor
    first: int  # the first place the target wrote


@dataclass(frozen=True)
class Wiring:
    """One way to connect a head, in words, and how to set it."""

    words: str
    set: Callable[[DraftHead[Any]], None]


@torch.inference_mode()
def examine(runner: ModelRunner, head: DraftHead[Any], beginnings: list[list[int]], where: str) -> str:
    """Try what the file says and what it may have meant. Says what was corrected; refuses a head that knows nothing."""
    texts = [text for text in write(runner, beginnings) if len(text.tokens) - text.first >= LEAST_TOKENS]
    if not texts:
        return f"{where}: the target writes too little to examine it by"
    stated = head.config
    best, best_found = Wiring("", _as(stated)), accuracy(head, texts)
    said = best_found
    for wiring in wirings(head, runner.model.config.layers):
        wiring.set(head)
        found = accuracy(head, texts)
        _as(stated)(head)
        if found > best_found + (BETTER if not best.words else 0.0):
            best, best_found = wiring, found
    if best_found < POOR:
        raise ModelError(
            f"{where}: of {best_found:.0%} of its first guesses the target writes the same, whichever way it is "
            "connected; it is not a head for this target, or its format is not what its config says"
        )
    best.set(head)
    if best.words:
        return f"{where}: guesses right {said:.0%} as its config says and {best_found:.0%} with {best.words}: taken so"
    return f"{where}: only {said:.0%} of its first guesses are right" if said < FAIR else ""


def _as(config: Any) -> Callable[[DraftHead[Any]], None]:
    def set_(head: DraftHead[Any]) -> None:
        head.config = config

    return set_


def wirings(head: DraftHead[Any], layers: int) -> Iterator[Wiring]:
    """What configs are known to get wrong: where a head taps, and which norms stand where."""
    config = head.config
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in config.hidden_layers)
        if min(taps) >= 0 and max(taps) <= layers:
            yield Wiring(f"taps {taps} for {config.hidden_layers}", _as(replace(config, hidden_layers=taps)))
    if isinstance(head, EagleHead):
        flag = not config.norm_before_residual
        if config.generation == 3:
            yield Wiring(f"norm_before_residual {flag}", _as(replace(config, norm_before_residual=flag)))
    if head.target_norm is not None:
        yield Wiring("states that are not normed", _as(replace(config, target_norm=False)))


def write(runner: ModelRunner, beginnings: list[list[int]]) -> list[GeneratedSample]:
    """Continue each beginning greedily with the target and return tokens and hidden states; [] if pages are short."""
    if not beginnings:
        return []
    request = Request("examine", (), SamplingParams(temperature=0.0), 0, TOKENS)
    seqs = [Sequence(-1 - i, request, list(tokens)) for i, tokens in enumerate(beginnings)]
    taps = tuple(range(runner.model.config.layers + 1))
    room = min(TOKENS, runner.context - max(map(len, beginnings)) - 1)
    try:
        if room < LEAST_TOKENS or not all(runner.reserve(seq, len(seq.tokens) + room) for seq in seqs):
            return []
        for _ in range(room):
            output = runner.forward([ScheduledSequence.of(seq, seq.pending) for seq in seqs], [Draft()] * len(seqs))
            for seq, token in zip(seqs, output.logits.argmax(-1).tolist(), strict=True):
                seq.cached = len(seq.tokens)
                seq.tokens.append(token)
        return [_thought(runner, seq, taps, len(start)) for seq, start in zip(seqs, beginnings, strict=True)]
    finally:
        for seq in seqs:
            runner.trim(seq, 0)


def _thought(runner: ModelRunner, seq: Sequence, taps: tuple[int, ...], first: int) -> GeneratedSample:
    seq.cached = 0
    share = ScheduledSequence.of(seq, len(seq.tokens))
    features = runner.executor.forward(pack([share], [Draft()], runner.layout.page_size), taps).hidden_states
    assert features is not None, "all layers were tapped"
    tokens = torch.tensor(seq.tokens, device=features.device)
    return GeneratedSample(tokens, features.view(len(tokens), len(taps), -1), first)


def accuracy(head: DraftHead[Any], texts: list[GeneratedSample]) -> float:
    """How often the first guess is what the target wrote."""
    right = total = 0
    for text in texts:
        guessed, places = first_guesses(head, text.tokens, text.states[:, list(head.config.hidden_layers)].flatten(1))
        counted = (places >= text.first) & (places < len(text.tokens))
        right += int((guessed[counted] == text.tokens[places[counted]]).sum())
        total += int(counted.sum())
    return right / max(total, 1)


def first_guesses(head: DraftHead[Any], tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """The guess behind each anchor of a text, and the place each is of."""
    features = features.to(head.like.dtype)
    places = torch.arange(1, len(tokens), device=tokens.device)  # of anchors: the first place has no state before it
    if isinstance(head, MedusaHead):
        logits = head.logits(head(features[:-1], 1))[:, 0]
    elif isinstance(head, BlockHead):
        features = head.with_token_hints(features, tokens)
        read = head.context_kv(head.fuse(features), head.rope_rows(torch.arange(len(tokens), device=tokens.device)))
        rows = places[:, None] + torch.arange(head.config.block, device=tokens.device)
        look = Flat(DenseBlockAttention(head.config, read, places), head.config.block)
        states = head.run_layers(head.block_inputs(tokens[places]).flatten(0, 1), head.rope_rows(rows.flatten()), look)
        first = head.draft_states(states.view(len(places), head.config.block, -1))[:, 0]
        logits = head.logits(first, tokens[places])
    else:
        assert isinstance(head, EagleHead | MtpHead | DistilledHead), "there are no other heads"
        look_back = DenseChainAttention(head.config.layer)
        logits = head.logits(head.step(tokens[1:], head.fuse(features)[:-1], head.rope_rows(places), look_back))
    return head.draft_ids[logits.argmax(-1)], places + 1


@dataclass(frozen=True)
class Flat:
    """Blocks attended row by row, as packed layers want them."""

    blocks: DenseBlockAttention
    rows: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (t.view(-1, self.rows, *t.shape[1:]) for t in (q, k, v))
        return self.blocks(layer, *parts).flatten(0, 1)
