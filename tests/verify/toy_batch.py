"""Many outputs of a toy language at once, generated with the engine's own noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foretell.certify.toy import Distribution, ToyLanguage
from foretell.sampling import noise
from foretell.verify.batched import ChainBatch, ChainResults

BatchedRule = Callable[[ChainBatch, Tensor, Tensor], ChainResults]


class ByRoot:
    """Noise keyed by the position of the step's root, as the engine does."""

    def uniforms(self, seeds: Tensor, roots: Tensor, width: int) -> Tensor:
        return noise.accept_uniforms(seeds, roots, torch.arange(width))

    def draft(self, seeds: Tensor, roots: Tensor, offset: int, vocab: int) -> Tensor:
        return noise.draft_noise(seeds, roots, offset, torch.arange(vocab))

    def exponentials(self, seeds: Tensor, roots: Tensor, vocab: int) -> Tensor:
        return noise.residual_noise(seeds, roots, torch.arange(vocab))


class ToyBatch:
    """A batch of toy sequences. Each is encoded as an integer: 1, then one digit per token in base `vocab`."""

    def __init__(self, language: ToyLanguage, keys: ByRoot, trials: int) -> None:
        self.language, self.keys = language, keys
        self.seeds = torch.arange(trials) * 7919 - trials
        self.target, self.draft = self._table(language.target), self._table(language.draft)

    def _table(self, rows: dict[tuple[int, ...], Tensor]) -> Tensor:
        depth = max(map(len, rows))
        table = torch.zeros(2 * self.language.vocab**depth, self.language.vocab, dtype=torch.float64)
        for context, row in rows.items():
            table[self.number(context)] = row
        return table

    def number(self, context: tuple[int, ...]) -> int:
        number = 1
        for token in context:
            number = number * self.language.vocab + token
        return number

    def distribution(self, rule: BatchedRule, width: int, length: int) -> Distribution:
        """Return the frequency of each output of `length` tokens."""
        outputs = torch.ones(len(self.seeds), dtype=torch.int64)
        lengths = torch.zeros_like(outputs)
        while (running := (lengths < length).nonzero()[:, 0]).numel():
            outputs[running], lengths[running] = self.step(
                rule, width, self.seeds[running], outputs[running], lengths[running]
            )
        counts = torch.bincount(outputs // self.language.vocab ** (lengths - length)) / len(outputs)
        return {
            context: float(counts[self.number(context)]) for context in self.language.target if len(context) == length
        }

    def step(
        self, rule: BatchedRule, width: int, seeds: Tensor, outputs: Tensor, roots: Tensor
    ) -> tuple[Tensor, Tensor]:
        tokens: list[Tensor] = []
        reached = [outputs]
        for offset in range(width):
            exponentials = self.keys.draft(seeds, roots, offset, self.language.vocab)
            tokens.append((self.draft[reached[-1]] / exponentials).argmax(1))
            reached.append(reached[-1] * self.language.vocab + tokens[-1])
        chains = ChainBatch(
            torch.stack(tokens, 1),
            torch.full_like(outputs, width),
            self.target[torch.stack(reached, 1)],
            self.draft[torch.stack(reached[:-1], 1)],
        )
        uniforms = self.keys.uniforms(seeds, roots, width)
        exponentials = self.keys.exponentials(seeds, roots, self.language.vocab)
        result = rule(chains, uniforms, exponentials)
        kept = torch.stack(reached, 1).gather(1, result.accepted[:, None])[:, 0]
        return kept * self.language.vocab + result.next_tokens, roots + result.accepted + 1
