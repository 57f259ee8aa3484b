"""Many texts of a toy language at once, written with the engine's own noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foretell.certify.toy import Law, World
from foretell.sampling import noise
from foretell.verify.batched import Chains, Verdicts

BatchedRule = Callable[[Chains, Tensor, Tensor], Verdicts]


class ByRoot:
    """Noise as the rules ask for it: by the position of the step's root."""

    def coins(self, seeds: Tensor, roots: Tensor, width: int) -> Tensor:
        return noise.accept_uniforms(seeds, roots, torch.arange(width))

    def draft(self, seeds: Tensor, roots: Tensor, offset: int, vocab: int) -> Tensor:
        return noise.draft_noise(seeds, roots, offset, torch.arange(vocab))

    def race(self, seeds: Tensor, roots: Tensor, vocab: int) -> Tensor:
        return noise.residual_noise(seeds, roots, torch.arange(vocab))


class Crowd:
    """A text is a number: 1, then a digit a token in the base of the vocabulary's size."""

    def __init__(self, here: World, keys: ByRoot, trials: int) -> None:
        self.here, self.keys = here, keys
        self.seeds = torch.arange(trials) * 7919 - trials
        self.target, self.draft = self._table(here.target), self._table(here.draft)

    def _table(self, rows: dict[tuple[int, ...], Tensor]) -> Tensor:
        depth = max(map(len, rows))
        table = torch.zeros(2 * self.here.vocab**depth, self.here.vocab, dtype=torch.float64)
        for context, row in rows.items():
            table[self.number(context)] = row
        return table

    def number(self, context: tuple[int, ...]) -> int:
        number = 1
        for token in context:
            number = number * self.here.vocab + token
        return number

    def law(self, rule: BatchedRule, width: int, length: int) -> Law:
        """How often each text of `length` tokens was written."""
        texts = torch.ones(len(self.seeds), dtype=torch.int64)
        lengths = torch.zeros_like(texts)
        while (busy := (lengths < length).nonzero()[:, 0]).numel():
            texts[busy], lengths[busy] = self.step(rule, width, self.seeds[busy], texts[busy], lengths[busy])
        counts = torch.bincount(texts // self.here.vocab ** (lengths - length)) / len(texts)
        return {context: float(counts[self.number(context)]) for context in self.here.target if len(context) == length}

    def step(self, rule: BatchedRule, width: int, seeds: Tensor, texts: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        tokens: list[Tensor] = []
        reached = [texts]
        for offset in range(width):
            race = self.keys.draft(seeds, roots, offset, self.here.vocab)
            tokens.append((self.draft[reached[-1]] / race).argmax(1))
            reached.append(reached[-1] * self.here.vocab + tokens[-1])
        chains = Chains(
            torch.stack(tokens, 1),
            torch.full_like(texts, width),
            self.target[torch.stack(reached, 1)],
            self.draft[torch.stack(reached[:-1], 1)],
        )
        coins, race = self.keys.coins(seeds, roots, width), self.keys.race(seeds, roots, self.here.vocab)
        verdict = rule(chains, coins, race)
        kept = torch.stack(reached, 1).gather(1, verdict.accepted[:, None])[:, 0]
        return kept * self.here.vocab + verdict.next_tokens, roots + verdict.accepted + 1
