"""Steps of an assistant over the target's KV cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foretell.kernels.attention import Span, SpanGroup, group_spans
from foretell.kv.cache import KVCache
from foretell.models.decoder import attention_layout
from foretell.models.draft_heads import AssistantHead
from foretell.types import Sequence


class AssistantSteps:
    """Runs an assistant for some sequences, all of whose tokens but the last are in the target's cache."""

    def __init__(self, head: AssistantHead, cache: KVCache, seqs: list[Sequence], hidden: Tensor) -> None:
        """`hidden` [sequences, target width]: the target's hidden state of the position before the last."""
        self.head, self.cache, self.seqs = head, cache, seqs
        self.hidden = head.normalize_hidden(hidden.to(head.like.dtype))  # of the rows of the last step
        self.layout = attention_layout(head.config.decoder, cache.page_size, head.like)

    def chain_step(self, tokens: list[int]) -> Tensor:
        """Return logits [sequences, vocab] after one more token of each sequence."""
        return self._step(tokens, self.seqs, group_spans([self._span(i, i) for i in range(len(tokens))], self.layout))

    def tree_step(self, tokens: list[int], owners: list[int], parent_rows: list[int]) -> Tensor:
        """Return logits [nodes, vocab] of tree nodes, sequence by sequence.

        `owners` are the indices of their sequences, `parent_rows` the rows of their parents in the last step.
        """
        self.hidden = self.hidden[parent_rows]
        groups, first = [], 0
        for owner in dict.fromkeys(owners):
            count = owners.count(owner)
            groups.append(self._shared_context(owner, first, count))
            first += count
        return self._step(tokens, [self.seqs[owner] for owner in owners], groups)

    def _step(self, tokens: list[int], seqs: list[Sequence], groups: list[SpanGroup]) -> Tensor:
        device = self.hidden.device
        # All tokens of a draft have the position of the sequence's last token, as in training.
        positions = torch.tensor([len(seq.tokens) - 1 for seq in seqs], device=device)
        states = self.head.step(torch.tensor(tokens, device=device), self.hidden, positions, groups, self.cache)
        self.hidden = self.head.carry(states)
        return self.head.logits(states)

    def _span(self, index: int, first: int) -> Span:
        """Return a row that attends to all positions in the cache."""
        seq = self.seqs[index]
        cached = len(seq.tokens) - 1
        pages = seq.pages[: -(-cached // self.cache.page_size)]
        return Span(first, 1, cached - 1, tuple(pages))

    def _shared_context(self, index: int, first: int, count: int) -> SpanGroup:
        """Return `count` rows of one sequence that attend to the same positions."""
        (group,) = group_spans([self._span(index, first)], self.layout)
        masks = {window: None if mask is None else mask[:, :, :1] for window, mask in group.masks.items()}
        return replace(group, rows=slice(first, first + count), num_rows=count, masks=masks)
