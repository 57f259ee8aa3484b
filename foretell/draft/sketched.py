"""Heads of the shapes that will guess, with nothing in them: by them kernels are compiled before those are here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from foretell.kv.cache import LayerShape
from foretell.models.decoder import Decoder
from foretell.models.heads import Head, HeadConfig, Lender, make_head
from foretell.models.heads.open import pack_head
from foretell.runner.cuda_warm import EVEN
from foretell.runner.head_pages import beside
from foretell.runner.made_up import MadeUp
from foretell.runner.runner import ModelRunner

from .heads_kinds import head_drafter
from .rehearsal import Guessing, chains, rehearse_guess, trees

NODES, LONGEST = 64, 16  # of drafts by which kernels are compiled


class SketchedHeads:
    """For a model of few layers, which stands for the target."""

    def __init__(self, configs: Iterable[HeadConfig], grow: bool) -> None:
        """`grow`: whether they will be asked for trees."""
        self.configs = tuple(configs)
        straight, grown = chains(LONGEST), trees(NODES, LONGEST) if grow else []
        # Drafts whose tokens are drawn have kernels of their own, which do not hang on how deep they are.
        drawn = [replace(each, temperature=1.0) for each in (straight[1], *grown[3:4])]
        self.wanted: tuple[Guessing, ...] = (*straight, *grown, *drawn)
        self._heads: list[Head[Any]] = []

    @property
    def beside(self) -> tuple[LayerShape, ...]:
        """The layers they need in the model's cache."""
        return tuple(shape for config in self.configs for shape in beside(config))

    def borrow(self, model: Decoder, context: int) -> None:
        """Come to be, with the model's embedding and output; before its weights are rounded."""
        self._heads = [_sketched(config, model, context) for config in self.configs]

    def rehearse(self, runner: ModelRunner, stopped: Callable[[], bool]) -> int:
        """Guess for texts that nobody wrote; how often. What the runner taps they take for what they want."""
        made_up, first, count = MadeUp(runner), len(runner.model.layer_shapes), 0
        heads, self._heads = self._heads, []  # whoever holds this one does not hold on to their memory
        for head in heads:
            pack_head(head, runner.model)
            drafter = head_drafter(runner, head, first, head.config.kind)
            first += len(beside(head.config))
            for guessing in self.wanted:
                if stopped():
                    return count
                count += rehearse_guess(drafter, made_up, guessing)
        return count


def _sketched(config: HeadConfig, model: Decoder, context: int) -> Head[Any]:
    """A head over the ends of a model, as often as it taps places: which ones does not matter to any kernel."""
    dtype, device = model.dtype, model.embed.device
    config = replace(config, taps=tuple(model.config.layers if i % 2 else 0 for i in range(len(config.taps))))
    with torch.device("meta"):
        head = make_head(config).eval()
    for module in head.modules():
        for name, sketched in module._parameters.items():
            if sketched is not None:
                weight = torch.full(sketched.shape, EVEN, dtype=dtype, device=device)
                module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    head.like = torch.zeros(0, dtype=dtype, device=device)
    head.draft_ids = head.draft_ids.to(device)
    head.borrow(Lender.of(model))
    head.prepare(context)
    return head
