"""Drafts for texts that nobody wrote, so that the first that count wait for nothing: kernels are compiled by them, and
what comes again is recorded."""

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
from foretell.models.draft_heads import DraftHead, HeadConfig, TargetWeights, make_head
from foretell.models.draft_heads.loading import pack_head
from foretell.runner.cuda.warmup import DUMMY_WEIGHT, DummySequences
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.model_runner import ModelRunner
from foretell.types import Budget, ScheduledSequence, Sequence, StepResult

TEXT = 300  # tokens of a text: most that are written are in the first size that steps and drafts are made for


@dataclass(frozen=True)
class Guessing:
    """A draft, and how many places a head reads before it; sizes hang on both, and on how long the text is."""

    budget: Budget
    read: int = 1
    cached: int = TEXT
    temperature: float = 0.0
    texts: int = 1


# How deep drafts are that are recorded: others are filled up to these. What a head reads of a prompt, and behind it as
# many places as a draft left and one more, fills up to powers of two, which go along, so that no pair comes twice.
READS_BY_DEPTH = {1: 256, 2: 1, 3: 2, 4: 4, 5: 8, 6: 16, 8: 32, 12: 64, 16: 128}
# The same of a draft model, each level of which is a step of it: what is run in vain costs more than a recording.
OF_MODELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
SERVING = (2, 4, 8, 16)  # depths that serve for all others: none is filled up to more than twice its own


def chains(longest: int) -> list[Guessing]:
    """Of up to so many tokens."""
    return [Guessing(Budget(depth), read) for depth, read in READS_BY_DEPTH.items() if depth < longest] + (
        [Guessing(Budget(longest), READS_BY_DEPTH.get(longest, 1))] if longest else []
    )


def model_chains(longest: int) -> list[Guessing]:
    """The same of a draft model."""
    depths = [depth for depth in OF_MODELS if depth < longest] + ([longest] if longest else [])
    return [Guessing(Budget(depth)) for depth in depths]


def trees(most: int, longest: int) -> list[Guessing]:
    """Of so many nodes, and branches of up to so many: how wide a tree is makes no other size where texts are few."""
    return [Guessing(Budget(most, max_depth=each.budget.depth)) for each in chains(longest) if each.budget.depth < most]


def rehearse_guess(drafter: Drafter, made_up: DummySequences, guessing: Guessing, times: int = 1) -> int:
    """Let a drafter guess so, `times` over; how often it did. It keeps nothing of the texts."""
    done, nodes = 0, guessing.budget.nodes
    cached = max(1, min(guessing.cached, made_up.runner.context - 1 - nodes))
    with made_up.allocate(guessing.texts, cached, extra_tokens=nodes, temperature=guessing.temperature) as seqs:
        try:
            for _ in range(times if seqs else 0):
                if drafter.hidden_layers:
                    drafter.update_kv([_run(seq, min(guessing.read, cached), made_up.runner) for seq in seqs])
                drafter.propose(seqs, [guessing.budget] * len(seqs))
                done += 1
        finally:
            for seq in seqs:
                drafter.forget(seq)
    return done


def _run(seq: Sequence, places: int, runner: ModelRunner) -> StepResult:
    """A step that brought the last places of a text, as the target would tell of it."""
    width = len(runner.hidden_layers) * runner.model.config.width
    states = torch.zeros(places, width, dtype=runner.model.dtype, device=runner.device)
    return StepResult(
        ScheduledSequence(seq, places, start=seq.cached - places, length=seq.cached), hidden_states=states
    )


NODES, LONGEST = 64, 16  # of drafts by which kernels are compiled


class DummyHeads:
    """For a model of few layers, which stands for the target."""

    def __init__(self, configs: Iterable[HeadConfig], grow: bool) -> None:
        """`grow`: whether they will be asked for trees."""
        self.configs = tuple(configs)
        straight, grown = chains(LONGEST), trees(NODES, LONGEST) if grow else []
        # Drafts whose tokens are drawn have kernels of their own, which do not hang on how deep they are.
        drawn = [replace(each, temperature=1.0) for each in (straight[1], *grown[3:4])]
        self.wanted: tuple[Guessing, ...] = (*straight, *grown, *drawn)
        self._heads: list[DraftHead[Any]] = []

    @property
    def extra_layers(self) -> tuple[LayerShape, ...]:
        """The layers they need in the model's cache."""
        return tuple(shape for config in self.configs for shape in head_layer_shapes(config))

    def share_weights(self, model: Decoder, context: int) -> None:
        """Come to be, with the model's embedding and output; before its weights are rounded."""
        self._heads = [_sketched(config, model, context) for config in self.configs]

    def run(self, runner: ModelRunner, stopped: Callable[[], bool]) -> int:
        """Guess for texts that nobody wrote; how often. What the runner taps they take for what they want."""
        made_up, first, count = DummySequences(runner), len(runner.model.layer_shapes), 0
        heads, self._heads = self._heads, []  # whoever holds this one does not hold on to their memory
        for head in heads:
            pack_head(head, runner.model)
            drafter = head_drafter(runner, head, first, head.config.kind)
            first += len(head_layer_shapes(head.config))
            for guessing in self.wanted:
                if stopped():
                    return count
                count += rehearse_guess(drafter, made_up, guessing)
        return count


def _sketched(config: HeadConfig, model: Decoder, context: int) -> DraftHead[Any]:
    """A head over the ends of a model, as often as it taps places: which ones does not matter to any kernel."""
    dtype, device = model.dtype, model.embed.device
    config = replace(
        config, hidden_layers=tuple(model.config.layers if i % 2 else 0 for i in range(len(config.hidden_layers)))
    )
    with torch.device("meta"):
        head = make_head(config).eval()
    for module in head.modules():
        for name, sketched in module._parameters.items():
            if sketched is not None:
                weight = torch.full(sketched.shape, DUMMY_WEIGHT, dtype=dtype, device=device)
                module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    head.like = torch.zeros(0, dtype=dtype, device=device)
    head.draft_ids = head.draft_ids.to(device)
    head.share_weights(TargetWeights.of(model))
    head.prepare(context)
    return head
