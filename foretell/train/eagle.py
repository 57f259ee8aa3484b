"""Training an EAGLE head by what it will do: guess from its own guesses (training-time test)."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.norm import rms_norm
from foretell.models.heads import EagleHead

from .capture import Capture, States
from .dense import causal, near, spread
from .losses import LK, Mix, rows_loss
from .method import Goals, HeadMethod, Progress, goals_of, mean_weight

DECAY = 0.8  # of a step's weight: a later guess counts only where all before it stand


class EagleMethod(HeadMethod[EagleHead]):
    """Step s reads the text's tokens s further on, and where the target's features were, what step s-1 gave."""

    def __init__(self, head: EagleHead, capture: Capture, steps: int, mix: Mix = LK) -> None:
        super().__init__(head, capture)
        self.steps, self.mix = steps, mix

    def __call__(self, states: States, generator: torch.Generator) -> Progress:
        tokens, learnt, head = states.batch.tokens, states.batch.learnt, self.head
        goals, attend = goals_of(self.capture, states, head), TestAttend(head.config.layer.scale, self._window)
        places = torch.arange(1, tokens.shape[1], device=tokens.device)
        feature = head.fuse(states.features)[:, :-1]
        weight = mean_weight(goals)
        total, hits, counted = feature.new_zeros((), dtype=torch.float32), [], []
        for step in range(self.steps):
            said = head.step(_shifted(tokens[:, 1:], step), feature, head.turn(places + step), attend)
            wanted = _shifted(learnt[:, 1:], step + 1)
            loss, hit = self._score(said, wanted, step, goals, weight * DECAY**step)
            total, feature = total + loss, head.carry(said)
            hits.append(hit)
            counted.append(wanted)
        return Progress(total, torch.stack(hits, -1).flatten(0, 1), torch.stack(counted, -1).flatten(0, 1))

    @property
    def _window(self) -> int | None:
        return self.head.config.layer.window

    def _score(self, said: Tensor, wanted: Tensor, step: int, goals: Goals, weight: float) -> tuple[Tensor, Tensor]:
        """The loss of one step's guesses, and which are right, [rows, places]."""
        head = self.head
        row, column = wanted.nonzero(as_tuple=True)
        normed = said if head.norm is None else rms_norm(said, head.norm.weight, head.config.layer.norm_eps)
        place = column + 1 + step
        scored = rows_loss(normed[row, column], self.output, goals.at(row, place, weight), self.mix)
        hit = torch.zeros_like(wanted)
        hit[row, column] = goals.hits(row, place, scored)
        return scored.loss, hit


class TestAttend:
    """A row sees the keys of step 0 up to its own place, and of each later step those of its own column alone."""

    __test__ = False  # no test of pytest's

    def __init__(self, scale: float, window: int | None) -> None:
        self.scale, self.window = scale, window
        self.first: dict[int, tuple[Tensor, Tensor]] = {}
        self.later: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.mask: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = q.shape[-2] // k.shape[-2]
        if layer not in self.first:
            self.first[layer] = (spread(k, share).transpose(1, 2), spread(v, share).transpose(1, 2))
            return causal(q, k, v, self.scale, self.window)
        self.later.setdefault(layer, []).append((spread(k, share), spread(v, share)))
        return self._mixed(q, *self.first[layer], self.later[layer])

    def _mixed(self, q: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        rows, length, heads, dim = q.shape
        hidden = self._hidden(length, len(own), q)
        flat = q.transpose(1, 2).reshape(rows * heads, length, dim)
        scores = torch.baddbmm(hidden, flat, keys.reshape(rows * heads, length, dim).mT, alpha=self.scale)
        beside = [(q * k).sum(-1).transpose(1, 2).reshape(rows * heads, length, 1) * self.scale for k, _ in own]
        shares = torch.cat([scores, *beside], -1).softmax(-1)
        seen = torch.bmm(shares[..., :length], values.reshape(rows * heads, length, dim))
        for i, (_, v) in enumerate(own):
            seen = seen + shares[..., length + i, None] * v.transpose(1, 2).reshape(rows * heads, length, dim)
        return seen.view(rows, heads, length, dim).transpose(1, 2)

    def _hidden(self, length: int, step: int, like: Tensor) -> Tensor:
        """What is added to scores so that nothing later is seen, nor what a window leaves behind."""
        if self.mask is None or self.window is not None:
            window = None if self.window is None else self.window - step
            seen = near(length, window, like.device)
            self.mask = like.new_zeros(length, length).masked_fill_(~seen, torch.finfo(like.dtype).min)
        return self.mask


def _shifted(x: Tensor, by: int) -> Tensor:
    """Columns moved left, with nothing behind them."""
    if by == 0:
        return x
    moved = torch.zeros_like(x)
    moved[:, : x.shape[1] - by] = x[:, by:]
    return moved
