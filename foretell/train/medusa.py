"""Training objectives of Medusa heads: on a frozen target, and with the target tuned along (Speculative Streaming)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from foretell.build.model_source import ModelSource
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import MedusaHead, TargetWeights, write_head

from .capture import HiddenStateCapture, TargetStates
from .dense_forward import dense_forward, final_norm, output_weight
from .export import write_model
from .losses import LK, LossRows, LossWeights, chunked_loss
from .objective import HeadObjective, Objective, ObjectiveResult, PositionTargets, mean_weight, position_targets
from .token_dataset import BatchLoader

DECAY = 0.8  # loss weight per head: a later draft token counts only if all before it are accepted
HEADS_FOLDER = "heads"  # subfolder of a tuned model with its Medusa heads
HEADS_LOSS_WEIGHT = 0.2  # of the heads' loss relative to keeping the target's own distribution
KEEP_LOSS = LossWeights(kl=1.0)


class MedusaObjective(HeadObjective[MedusaHead]):
    """Trains Medusa heads in parallel: head i drafts the token i + 2 positions after its hidden state."""

    def __init__(self, head: MedusaHead, capture: HiddenStateCapture, loss_weights: LossWeights = LK) -> None:
        assert not head.config.own_output, "the heads share the target's output matrix"
        super().__init__(head, capture)
        self.loss_weights = loss_weights

    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult:
        targets = position_targets(self.capture, states, self.head)
        hidden = self.head(states.hidden_states)
        return _heads_loss(self.head, hidden, targets, states.batch.loss_mask, mean_weight(targets), self.loss_weights)


class StreamingObjective(Objective):
    """Trains the target's layers together with Medusa heads; embedding, final norm and output matrix stay frozen.

    The loss keeps the tuned target close to its original distribution (KL).
    """

    def __init__(
        self,
        target: Decoder,
        head: MedusaHead,
        capture: HiddenStateCapture,
        source: ModelSource,
        loss_weights: LossWeights,
    ) -> None:
        self.tuned = copy.deepcopy(target)
        self.head, self.capture, self.source, self.loss_weights = head, capture, source, loss_weights
        head.share_weights(TargetWeights.of(self.tuned))
        self.full_vocab = torch.arange(target.config.vocab, device=target.embed.device)

    def parameters(self) -> list[nn.Parameter]:
        layers = list(self.tuned.blocks.parameters())
        for each in layers:
            each.requires_grad_(True)
        return [*layers, *self.head.trainable_parameters()]

    def state_dict(self) -> dict[str, Tensor]:
        blocks = {f"blocks.{name}": each for name, each in self.tuned.blocks.state_dict().items()}
        return blocks | {f"head.{name}": each for name, each in self.head.own_state_dict().items()}

    def __call__(self, states: TargetStates, generator: torch.Generator) -> ObjectiveResult:
        tokens = states.batch.tokens
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x, _ = dense_forward(self.tuned, self.capture.rope, tokens, positions, self.capture.attend)
        targets = position_targets(self.capture, states, self.head)
        weight = mean_weight(targets)
        keep_loss = self._keep_loss(final_norm(self.tuned, x), states, weight)
        result = _heads_loss(
            self.head, self.head(x), targets, states.batch.loss_mask, HEADS_LOSS_WEIGHT * weight, self.loss_weights
        )
        return replace(result, loss=keep_loss + result.loss)

    def _keep_loss(self, final_hidden: Tensor, states: TargetStates, weight: float) -> Tensor:
        """Return the KL divergence of the tuned target from the original one at every answer position."""
        mask = torch.zeros_like(states.batch.loss_mask)
        mask[:, :-1] = states.batch.loss_mask[:, 1:]
        original = self.capture.distribution(states.final_hidden[mask], self.full_vocab)
        indices = torch.arange(len(original.argmax), device=final_hidden.device)
        weights = torch.full(original.argmax.shape, weight, device=final_hidden.device)
        rows = LossRows(original.probs, indices, original.argmax, weights)
        return chunked_loss(final_hidden[mask], output_weight(self.tuned), rows, KEEP_LOSS).loss

    def save(self, folder: Path, accuracy: tuple[float, ...]) -> None:
        """Write the tuned model, with the heads in a subfolder."""
        write_model(self.tuned, self.source, folder)
        config = self.head.config
        self.head.config = replace(config, accuracy=accuracy)
        write_head(self.head, folder / HEADS_FOLDER)
        self.head.config = config


def _heads_loss(
    head: MedusaHead,
    hidden: Tensor,
    targets: PositionTargets,
    loss_mask: Tensor,
    weight: float,
    loss_weights: LossWeights,
) -> ObjectiveResult:
    """Sum the losses of all heads; `hidden` is [rows, length, heads, width]."""
    assert head.output.weight is not None, "a head in training has its weights"
    total = hidden.new_zeros((), dtype=torch.float32)
    matches: list[Tensor] = []
    masks: list[Tensor] = []
    for i in range(head.config.heads):
        mask = torch.zeros_like(loss_mask)
        mask[:, : -2 - i] = loss_mask[:, 2 + i :]  # the state at position t predicts the token at t + 2 + i
        row, position = mask.nonzero(as_tuple=True)
        rows = targets.at(row, position + 1 + i, weight * DECAY**i)
        scored = chunked_loss(hidden[row, position, i], head.output.weight, rows, loss_weights)
        total = total + scored.loss
        match = torch.zeros_like(mask)
        match[row, position] = targets.matches(row, position + 1 + i, scored)
        matches.append(match)
        masks.append(mask)
    return ObjectiveResult(total, torch.stack(matches, -1), torch.stack(masks, -1))


@torch.no_grad()
def perplexity(model: Decoder, capture: HiddenStateCapture, batches: BatchLoader) -> float:
    """Return a model's perplexity over the answer tokens."""
    loss, count = 0.0, 0
    for batch in batches.eval_batches():
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        x, _ = dense_forward(model, capture.rope, batch.tokens, positions, capture.attend)
        mask = torch.zeros_like(batch.loss_mask)
        mask[:, :-1] = batch.loss_mask[:, 1:]
        logits = nn.functional.linear(final_norm(model, x)[mask], output_weight(model)).float()
        labels = torch.zeros_like(batch.tokens)
        labels[:, :-1] = batch.tokens[:, 1:]
        loss += float(nn.functional.cross_entropy(logits, labels[mask], reduction="sum"))
        count += int(mask.sum())
    return math.exp(loss / max(1, count))
