"""Warm-up of drafters on dummy sequences: it compiles kernels and captures CUDA graphs before the first request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from foretell.draft.base import Drafter
from foretell.draft.registry import head_drafter
from foretell.kv.cache import LayerShape
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import AssistantConfig, DraftHead, HeadConfig, TargetWeights, make_head
from foretell.models.draft_heads.loading import pack_head
from foretell.runner.cuda.warmup import DUMMY_WEIGHT, DummySequences
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.model_runner import ModelRunner
from foretell.types import Budget, ScheduledSequence, Sequence, StepResult

CONTEXT = 300  # tokens of a dummy sequence: most requests fall into the first size of steps and drafts


@dataclass(frozen=True)
class WarmupDraft:
    """A draft to warm up with; the sizes of its graphs depend on all of these fields."""

    budget: Budget
    prefill: int = 1  # positions that a head reads before it drafts
    cached: int = CONTEXT
    temperature: float = 0.0
    num_seqs: int = 1


# Depths of captured drafts, to which others are padded, and with each a prefill length. A head reads a prompt, or the
# accepted tokens of a draft, padded to powers of two; pairing the two sizes captures both in one pass.
PREFILL_BY_DEPTH = {1: 256, 2: 1, 3: 2, 4: 4, 5: 8, 6: 16, 8: 32, 12: 64, 16: 128}
# Depths of captured chains of a draft model. There are more: a padded level is a forward of the model.
MODEL_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
SERVING_DEPTHS = (2, 4, 8, 16)  # depths that serve all others with at most twice the depth


def warmup_chains(max_depth: int) -> list[WarmupDraft]:
    """Return the chains of a head up to a depth."""
    drafts = [WarmupDraft(Budget(depth), prefill) for depth, prefill in PREFILL_BY_DEPTH.items() if depth < max_depth]
    if max_depth:
        drafts.append(WarmupDraft(Budget(max_depth), PREFILL_BY_DEPTH.get(max_depth, 1)))
    return drafts


def warmup_model_chains(max_depth: int) -> list[WarmupDraft]:
    """Return the chains of a draft model up to a depth."""
    depths = [depth for depth in MODEL_DEPTHS if depth < max_depth] + ([max_depth] if max_depth else [])
    return [WarmupDraft(Budget(depth)) for depth in depths]


def warmup_trees(nodes: int, max_depth: int) -> list[WarmupDraft]:
    """Return trees of so many nodes up to a depth; with few sequences the width does not change the graph's size."""
    return [
        WarmupDraft(Budget(nodes, max_depth=each.budget.depth))
        for each in warmup_chains(max_depth)
        if each.budget.depth < nodes
    ]


def warm_up_draft(
    drafter: Drafter,
    dummies: DummySequences,
    draft: WarmupDraft,
    repeats: int = 1,
    update_kv: Callable[[list[StepResult]], None] | None = None,
) -> int:
    """Let a drafter draft for dummy sequences, which it forgets afterwards, and return how often it did.

    `update_kv` is the drafter's own, if it reads hidden states.
    """
    done, nodes = 0, draft.budget.nodes
    cached = max(1, min(draft.cached, dummies.runner.context - 1 - nodes))
    with dummies.allocate(draft.num_seqs, cached, extra_tokens=nodes, temperature=draft.temperature) as seqs:
        try:
            for _ in range(repeats if seqs else 0):
                if update_kv is not None:
                    update_kv([_dummy_result(seq, min(draft.prefill, cached), dummies.runner) for seq in seqs])
                drafter.propose(seqs, [draft.budget] * len(seqs))
                done += 1
        finally:
            for seq in seqs:
                drafter.forget(seq)
    return done


def _dummy_result(seq: Sequence, count: int, runner: ModelRunner) -> StepResult:
    """Return the result of a step that ran the last `count` positions of a sequence."""
    width = len(runner.hidden_layers) * runner.model.config.width
    states = torch.zeros(count, width, dtype=runner.model.dtype, device=runner.device)
    scheduled = ScheduledSequence(seq, count, start=seq.num_computed_tokens - count, length=seq.num_computed_tokens)
    return StepResult(scheduled, hidden_states=states)


MAX_NODES = 64  # nodes of the trees that compile kernels
MAX_DEPTH = 16  # and their depth


class DummyHeads:
    """Heads with dummy weights for a model of few layers that stands in for the target while weights are loaded."""

    def __init__(self, configs: Iterable[HeadConfig], trees: bool) -> None:
        """`trees`: the heads will be asked for trees."""
        # An assistant attends to the target's layers, which the model that stands in has not; it has no kernels.
        self.configs = tuple(config for config in configs if not isinstance(config, AssistantConfig))
        chains = warmup_chains(MAX_DEPTH)
        grown = warmup_trees(MAX_NODES, MAX_DEPTH) if trees else []
        # Sampled drafts have kernels of their own, which do not depend on the depth.
        sampled = [replace(each, temperature=1.0) for each in (chains[1], *grown[3:4])]
        self.drafts: tuple[WarmupDraft, ...] = (*chains, *grown, *sampled)
        self._heads: list[DraftHead[Any]] = []

    @property
    def extra_layers(self) -> tuple[LayerShape, ...]:
        """KV cache layers that the heads need after the model's own."""
        return tuple(shape for config in self.configs for shape in head_layer_shapes(config))

    def share_weights(self, model: Decoder, context: int) -> None:
        """Create the heads with the model's embedding and output layer, before those are quantized."""
        self._heads = [_dummy_head(config, model, context) for config in self.configs]

    def run(self, runner: ModelRunner, stopped: Callable[[], bool]) -> int:
        """Draft for dummy sequences until `stopped`, and return how many drafts were run."""
        dummies, first, count = DummySequences(runner), len(runner.model.layer_shapes), 0
        heads, self._heads = self._heads, []  # frees their memory at the end of this call
        for head in heads:
            pack_head(head, runner.model)
            drafter = head_drafter(runner, head, first, head.config.kind)
            first += len(head_layer_shapes(head.config))
            for draft in self.drafts:
                if stopped():
                    return count
                count += warm_up_draft(drafter, dummies, draft, update_kv=drafter.update_kv)
        return count


def _dummy_head(config: HeadConfig, model: Decoder, context: int) -> DraftHead[Any]:
    """Return a head over the model's first and last hidden layer, as many times as its config has hidden layers: no
    kernel depends on which layers they are."""
    dtype, device = model.dtype, model.embed.device
    layers = tuple(model.config.layers if i % 2 else 0 for i in range(len(config.hidden_layers)))
    with torch.device("meta"):
        head = make_head(replace(config, hidden_layers=layers)).eval()
    for module in head.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                weight = torch.full(parameter.shape, DUMMY_WEIGHT, dtype=dtype, device=device)
                module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    head.like = torch.zeros(0, dtype=dtype, device=device)
    head.draft_ids = head.draft_ids.to(device)
    head.share_weights(TargetWeights.of(model))
    head.prepare(context)
    return head
