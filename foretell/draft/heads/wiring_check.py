"""Checks that a head from another source is wired to this target as its config says, and corrects what it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foretell.errors import ModelError
from foretell.models.draft_heads import (
    AssistantHead,
    BlockHead,
    DistilledHead,
    DraftHead,
    EagleHead,
    MedusaHead,
    MtpHead,
)
from foretell.models.draft_heads.dense_attention import DenseBlockAttention, DenseChainAttention
from foretell.runner.batch_layout import pack
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import NO_DRAFT, Request, ScheduledSequence, Sequence

TOKENS = 64  # generated after each prompt
MIN_TOKENS = 16  # fewer show nothing
FAIR_ACCURACY = 0.30  # of first draft tokens; below it the wiring is suspect
POOR_ACCURACY = 0.10  # below it the head is refused
MIN_GAIN = 0.10  # accuracy by which another wiring must be better
CHECK_PROMPTS = (
    "The history of bread begins",
    "def read_lines(path):\n",
    "Question: Why is the sky blue?\nAnswer:",
    "Here is a list of five things to pack for a trip:\n1.",
)


@dataclass(frozen=True)
class GeneratedSample:
    """A text that the target generated, and its hidden states after every layer, [positions, layers + 1, width]."""

    tokens: Tensor
    states: Tensor
    first: int  # position of the first generated token


@dataclass(frozen=True)
class Wiring:
    """A way to connect a head: a description and a function that sets it."""

    description: str
    apply: Callable[[DraftHead[Any]], None]


@torch.inference_mode()
def check_wiring(runner: ModelRunner, head: DraftHead[Any], prompts: list[list[int]], where: str) -> str:
    """Measure the wiring of the config and known alternatives, apply the best and return a message, "" if all is well.

    Raises `ModelError` if no wiring drafts better than chance.
    """
    if isinstance(head, AssistantHead):
        return ""  # its config leaves nothing open, and it needs the target's pages to draft
    generated = generate_samples(runner, prompts)
    samples = [sample for sample in generated if len(sample.tokens) - sample.first >= MIN_TOKENS]
    if not samples:
        return f"{where}: not checked, the target generates too few tokens"
    stated = head.config
    best, best_accuracy = Wiring("", _with_config(stated)), accuracy(head, samples)
    stated_accuracy = best_accuracy
    for wiring in known_wirings(head, runner.model.config.layers):
        wiring.apply(head)
        found = accuracy(head, samples)
        _with_config(stated)(head)
        if found > best_accuracy + (MIN_GAIN if not best.description else 0.0):
            best, best_accuracy = wiring, found
    if best_accuracy < POOR_ACCURACY:
        raise ModelError(
            f"{where}: the target agrees with {best_accuracy:.0%} of its first draft tokens, however it is wired; "
            "it is not a head for this target, or its format differs from its config"
        )
    best.apply(head)
    if best.description:
        return (
            f"{where}: first draft tokens are right {stated_accuracy:.0%} of the time as its config says and "
            f"{best_accuracy:.0%} with {best.description}; using the latter"
        )
    if stated_accuracy < FAIR_ACCURACY:
        return f"{where}: only {stated_accuracy:.0%} of its first draft tokens are right"
    return ""


def _with_config(config: Any) -> Callable[[DraftHead[Any]], None]:
    def apply(head: DraftHead[Any]) -> None:
        head.config = config

    return apply


def known_wirings(head: DraftHead[Any], num_layers: int) -> Iterator[Wiring]:
    """Yield alternatives for what configs are known to get wrong: the hidden layers, and which norms apply."""
    config = head.config
    for shift in (-1, 1):
        layers = tuple(layer + shift for layer in config.hidden_layers)
        if min(layers) >= 0 and max(layers) <= num_layers:
            description = f"hidden layers {layers} instead of {config.hidden_layers}"
            yield Wiring(description, _with_config(replace(config, hidden_layers=layers)))
    if isinstance(head, EagleHead) and config.generation == 3:
        flag = not config.norm_before_residual
        yield Wiring(f"norm_before_residual {flag}", _with_config(replace(config, norm_before_residual=flag)))
    if head.target_norm is not None:
        yield Wiring("hidden states without the target's norm", _with_config(replace(config, target_norm=False)))


def generate_samples(runner: ModelRunner, prompts: list[list[int]]) -> list[GeneratedSample]:
    """Continue each prompt greedily with the target and return tokens and hidden states; [] if pages are short."""
    if not prompts:
        return []
    request = Request("wiring-check", (), SamplingParams(temperature=0.0), 0, TOKENS)
    seqs = [Sequence(-1 - i, request, list(tokens)) for i, tokens in enumerate(prompts)]
    layers = tuple(range(runner.model.config.layers + 1))
    count = min(TOKENS, runner.context - max(map(len, prompts)) - 1)
    try:
        if count < MIN_TOKENS or not all(runner.reserve(seq, len(seq.tokens) + count) for seq in seqs):
            return []
        for _ in range(count):
            scheduled = [ScheduledSequence.of(seq, seq.pending) for seq in seqs]
            output = runner.forward(scheduled, [NO_DRAFT] * len(seqs))
            for seq, token in zip(seqs, output.logits.argmax(-1).tolist(), strict=True):
                seq.num_computed_tokens = len(seq.tokens)
                seq.tokens.append(token)
        return [_with_hidden_states(runner, seq, layers, len(start)) for seq, start in zip(seqs, prompts, strict=True)]
    finally:
        for seq in seqs:
            runner.trim(seq, 0)


def _with_hidden_states(runner: ModelRunner, seq: Sequence, layers: tuple[int, ...], first: int) -> GeneratedSample:
    """Run a whole sequence once more and return it with the hidden states of all layers."""
    seq.num_computed_tokens = 0
    scheduled = ScheduledSequence.of(seq, len(seq.tokens))
    layout = pack([scheduled], [NO_DRAFT], runner.layout.page_size)
    states = runner.executor.forward(layout, layers).hidden_states
    assert states is not None, "all layers were requested"
    tokens = torch.tensor(seq.tokens, device=states.device)
    return GeneratedSample(tokens, states.view(len(tokens), len(layers), -1), first)


def accuracy(head: DraftHead[Any], samples: list[GeneratedSample]) -> float:
    """Return how often the first draft token equals the target's."""
    right = total = 0
    for sample in samples:
        states = sample.states[:, list(head.config.hidden_layers)].flatten(1)
        drafted, positions = first_draft_tokens(head, sample.tokens, states)
        counted = (positions >= sample.first) & (positions < len(sample.tokens))
        right += int((drafted[counted] == sample.tokens[positions[counted]]).sum())
        total += int(counted.sum())
    return right / max(total, 1)


def first_draft_tokens(head: DraftHead[Any], tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first draft token after every position of a text, and the positions they are for."""
    states = states.to(head.like.dtype)
    positions = torch.arange(1, len(tokens), device=tokens.device)  # the first has no hidden state before it
    if isinstance(head, MedusaHead):
        logits = head.logits(head(states[:-1], 1))[:, 0]
    elif isinstance(head, BlockHead):
        states = head.with_token_hints(states, tokens)
        context = head.context_kv(head.fuse(states), head.rope_rows(torch.arange(len(tokens), device=tokens.device)))
        rows = positions[:, None] + torch.arange(head.config.block, device=tokens.device)
        attend = FlatBlockAttention(DenseBlockAttention(head.config, context, positions), head.config.block)
        inputs = head.block_inputs(tokens[positions]).flatten(0, 1)
        outputs = head.run_layers(inputs, head.rope_rows(rows.flatten()), attend)
        first = head.draft_states(outputs.view(len(positions), head.config.block, -1))[:, 0]
        logits = head.logits(first, tokens[positions])
    else:
        assert isinstance(head, EagleHead | MtpHead | DistilledHead), "there are no other heads"
        attend_chain = DenseChainAttention(head.config.layer)
        logits = head.logits(head.step(tokens[1:], head.fuse(states)[:-1], head.rope_rows(positions), attend_chain))
    return head.draft_ids[logits.argmax(-1)], positions + 1


@dataclass(frozen=True)
class FlatBlockAttention:
    """Block attention over rows of all blocks in one dimension, as packed layers pass them."""

    blocks: DenseBlockAttention
    rows: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (t.view(-1, self.rows, *t.shape[1:]) for t in (q, k, v))
        return self.blocks(layer, *parts).flatten(0, 1)
