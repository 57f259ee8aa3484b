"""Training an EAGLE head by what it will do: guess from its own guesses (training-time test)."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.norm import rms_norm
from foretell.models.draft_heads import EagleHead

from .capture import Capture, States
from .dense_forward import causal, spread
from .losses import LK, Mix, rows_loss
from .objective import Goals, HeadMethod, Progress, goals_of, mean_weight

DECAY = 0.8  # of a step's weight: a later guess counts only where all before it stand


class EagleMethod(HeadMethod[EagleHead]):
    """Step s reads the text's tokens s further on, and where the target's features were, what step s-1 gave."""

    def __init__(self, head: EagleHead, capture: Capture, steps: int, mix: Mix = LK) -> None:
        super().__init__(head, capture)
        self.steps, self.mix = steps, mix

    def __call__(self, states: States, generator: torch.Generator) -> Progress:
        tokens, learnt, head = states.batch.tokens[:, 1:], states.batch.learnt[:, 1:], self.head
        goals, attend = goals_of(self.capture, states, head), TestAttend(head.config.layer.scale, self._window)
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        feature, weight = head.fuse(states.features)[:, :-1], mean_weight(goals)
        total, hits, counted = feature.new_zeros((), dtype=torch.float32), [], []
        for step in range(self.steps):
            said = head.step(
                shifted(tokens, step).gather(1, columns), feature, head.rope_rows(columns + 1 + step), attend
            )
            wanted = shifted(learnt, step + 1)
            loss, hit = self._score(said, wanted, columns, step, goals, weight * DECAY**step)
            total, feature = total + loss, head.carry(said)
            hits.append(hit)
            counted.append(wanted)
            if step == 0:  # prompts are read once; what is guessed from guesses are answers alone
                columns = worth_while(shifted(learnt, 2))
                feature = feature.gather(1, columns[..., None].expand(-1, -1, feature.shape[-1]))
                attend.narrow(columns)
        return Progress(total, torch.stack(hits, -1), torch.stack(counted, -1))

    @property
    def _window(self) -> int | None:
        return self.head.config.layer.window

    def _score(
        self, said: Tensor, wanted: Tensor, columns: Tensor, step: int, goals: Goals, weight: float
    ) -> tuple[Tensor, Tensor]:
        """The loss of one step's guesses, and which are right, [rows, places]."""
        head = self.head
        row, at = wanted.gather(1, columns).nonzero(as_tuple=True)
        normed = said if head.norm is None else rms_norm(said, head.norm.weight, head.config.layer.norm_eps)
        column = columns[row, at]
        place = column + 1 + step
        scored = rows_loss(normed[row, at], self.output, goals.at(row, place, weight), self.mix)
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
        self.columns: Tensor | None = None

    def narrow(self, columns: Tensor) -> None:
        """From now on there are rows for these columns [rows, n] alone."""
        self.columns = columns

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = q.shape[-2] // k.shape[-2]
        if layer not in self.first:
            self.first[layer] = (spread(k, share).transpose(1, 2), spread(v, share).transpose(1, 2))
            return causal(q, k, v, self.scale, self.window)
        self.later.setdefault(layer, []).append((spread(k, share).transpose(1, 2), spread(v, share).transpose(1, 2)))
        return self._mixed(q.transpose(1, 2) * self.scale, *self.first[layer], self.later[layer]).transpose(1, 2)

    def _mixed(self, q: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """q [rows, heads, n, dim] over keys of step 0 [rows, heads, length, dim] and one of each later step."""
        length = keys.shape[2]
        scores = (q @ keys.mT).masked_fill_(self._hidden(length, len(own), q), torch.finfo(q.dtype).min)
        beside = [(q * k).sum(-1, keepdim=True) for k, _ in own]
        shares = torch.cat([scores, *beside], -1).softmax(-1)
        seen = shares[..., :length] @ values
        for i, (_, v) in enumerate(own):
            seen = seen + shares[..., length + i, None] * v
        return seen

    def _hidden(self, length: int, step: int, q: Tensor) -> Tensor:
        """[rows or 1, 1, n, length]: keys behind a row's place, and those its window leaves behind."""
        place = torch.arange(length, device=q.device)
        columns = place[None] if self.columns is None else self.columns
        hidden = place > columns[..., None]
        if self.window is not None:
            hidden = hidden | (place <= columns[..., None] + step - self.window)
        return hidden[:, None]


def worth_while(wanted: Tensor) -> Tensor:
    """Of each row the columns that are wanted, [rows, most], filled up with others where a row has fewer."""
    most = max(1, int(wanted.sum(1).max()))
    return wanted.long().argsort(dim=1, descending=True, stable=True)[:, :most].sort(1).values


def shifted(x: Tensor, by: int) -> Tensor:
    """Columns moved left, with nothing behind them."""
    if by == 0:
        return x
    moved = torch.zeros_like(x)
    moved[:, : x.shape[1] - by] = x[:, by:]
    return moved
