"""Training objective of EAGLE-3 heads: training-time test, where a head drafts from its own earlier draft states."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.norm import rms_norm
from foretell.models.draft_heads import EagleHead

from .capture import HiddenStateCapture, TargetStates
from .dense_forward import causal_attention, repeat_kv
from .losses import LK, LossWeights, chunked_loss
from .objective import HeadObjective, ObjectiveResult, PositionTargets, mean_weight, position_targets

DECAY = 0.8  # loss weight per draft step: a later draft token counts only if all before it are accepted


class EagleObjective(HeadObjective[EagleHead]):
    """Unrolls `steps` draft steps at every position.

    Step s reads the document's tokens shifted by s, and the head's own states of step s-1 where step 0 reads the
    target's hidden states.
    """

    def __init__(
        self, head: EagleHead, capture: HiddenStateCapture, steps: int, loss_weights: LossWeights = LK
    ) -> None:
        super().__init__(head, capture)
        self.steps, self.loss_weights = steps, loss_weights

    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult:
        tokens, loss_mask, head = states.batch.tokens[:, 1:], states.batch.loss_mask[:, 1:], self.head
        targets = position_targets(self.capture, states, head)
        attend = TrainingTimeTestAttention(head.config.layer.scale, head.config.layer.window)
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden, weight = head.fuse(states.hidden_states)[:, :-1], mean_weight(targets)
        total = hidden.new_zeros((), dtype=torch.float32)
        matches: list[Tensor] = []
        masks: list[Tensor] = []
        for step in range(self.steps):
            inputs = shift_left(tokens, step).gather(1, columns)
            output = head.step(inputs, hidden, head.rope_rows(columns + 1 + step), attend)
            mask = shift_left(loss_mask, step + 1)
            loss, match = self._loss(output, mask, columns, step, targets, weight * DECAY**step)
            total, hidden = total + loss, head.carry(output)
            matches.append(match)
            masks.append(mask)
            if step == 0:  # step 0 runs over the prompt for its KV; later steps run at answer positions only
                columns = answer_columns(shift_left(loss_mask, 2))
                hidden = hidden.gather(1, columns[..., None].expand(-1, -1, hidden.shape[-1]))
                attend.set_columns(columns)
        return ObjectiveResult(total, torch.stack(matches, -1), torch.stack(masks, -1))

    def _loss(
        self, output: Tensor, mask: Tensor, columns: Tensor, step: int, targets: PositionTargets, weight: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of one step's draft tokens, and which match the target's argmax, [rows, positions]."""
        head = self.head
        row, index = mask.gather(1, columns).nonzero(as_tuple=True)
        normed = output if head.norm is None else rms_norm(output, head.norm.weight, head.config.layer.norm_eps)
        column = columns[row, index]
        position = column + 1 + step
        scored = chunked_loss(normed[row, index], self.output, targets.at(row, position, weight), self.loss_weights)
        match = torch.zeros_like(mask)
        match[row, column] = targets.matches(row, position, scored)
        return scored.loss, match


class TrainingTimeTestAttention:
    """Attention of an unrolled draft step, over step 0 up to its own position and over later steps of its own column.

    That is what the head sees when it is served: the target's context, then its own draft tokens.
    """

    def __init__(self, scale: float, window: int | None) -> None:
        self.scale, self.window = scale, window
        self.first: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: K and V of step 0
        self.later: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: K and V of each later step
        self.columns: Tensor | None = None

    def set_columns(self, columns: Tensor) -> None:
        """Run only these columns [rows, n] from now on."""
        self.columns = columns

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[-2] // k.shape[-2]
        kv = repeat_kv(k, groups).transpose(1, 2), repeat_kv(v, groups).transpose(1, 2)
        if layer not in self.first:
            self.first[layer] = kv
            return causal_attention(q, k, v, self.scale, self.window)
        self.later.setdefault(layer, []).append(kv)
        return self._attend(q.transpose(1, 2) * self.scale, *self.first[layer], self.later[layer]).transpose(1, 2)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend with q [rows, heads, n, dim] over step 0's keys [rows, heads, length, dim] and one per later step."""
        length = keys.shape[2]
        scores = (q @ keys.mT).masked_fill_(self._masked(length, len(own), q), torch.finfo(q.dtype).min)
        own_scores = [(q * k).sum(-1, keepdim=True) for k, _ in own]
        probs = torch.cat([scores, *own_scores], -1).softmax(-1)
        output = probs[..., :length] @ values
        for i, (_, v) in enumerate(own):
            output = output + probs[..., length + i, None] * v
        return output

    def _masked(self, length: int, step: int, q: Tensor) -> Tensor:
        """Return [rows or 1, 1, n, length]: keys after a row's position, or outside its sliding window."""
        position = torch.arange(length, device=q.device)
        columns = position[None] if self.columns is None else self.columns
        masked = position > columns[..., None]
        if self.window is not None:
            masked = masked | (position <= columns[..., None] + step - self.window)
        return masked[:, None]


def answer_columns(mask: Tensor) -> Tensor:
    """Return the columns that `mask` selects, [rows, most], padded with other columns in rows that have fewer."""
    most = max(1, int(mask.sum(1).max()))
    return mask.long().argsort(dim=1, descending=True, stable=True)[:, :most].sort(1).values


def shift_left(x: Tensor, by: int) -> Tensor:
    """Shift columns to the left and fill with zeros."""
    if by == 0:
        return x
    shifted = torch.zeros_like(x)
    shifted[:, : x.shape[1] - by] = x[:, by:]
    return shifted
