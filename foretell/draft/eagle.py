"""Guesses one token after another from the target's states: EAGLE heads, and multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.models.heads import DistilledHead, EagleHead, MtpHead
from foretell.runner.native_head import NOTHING, Beside, LaidOut, NativeChain, native_for_head
from foretell.runner.native_reading import Reading
from foretell.runner.runner import ModelRunner
from foretell.types import Budget, Sequence

from .chains import Chain, extend, hang
from .choosing import Plot, must_draw
from .eagle_trees import ALONE, DefinedSteps, NativeSteps, grow_trees
from .heads import HeadDrafter
from .heads_draws import draws_of
from .heads_pages import HeadPages, Look
from .heads_whole import goes_whole, grow_from, grow_whole, hang_whole, text_of, whole_steps


class EagleDrafter(HeadDrafter):
    """At place p it keeps the pair of p's token and the feature of p-1: that depends on nothing behind p."""

    head: EagleHead | MtpHead | DistilledHead
    prior = 0.65

    def __init__(
        self, runner: ModelRunner, head: EagleHead | MtpHead | DistilledHead, pages: HeadPages, *settings: Any
    ) -> None:
        super().__init__(runner, head, pages, *settings)
        native = native_for_head(head)
        self._native = None if native is None else NativeChain(native, head, pages.keys, pages.values)
        if self._native is not None:
            self.read_natively(self._native, runner.taps)
        self._whole = whole_steps(head, pages) if self.whole else None

    def read(self, readings: list[Reading], slots: Tensor, states: Tensor) -> None:
        self.keep_features(slots, states)
        # The first place of a text has no feature before it, and nothing is remembered there.
        spans = [(each.seq, max(each.start, 1), each.stop) for each in readings if each.stop > 1]
        if not spans:
            return
        tokens = [token for seq, start, stop in spans for token in seq.tokens[start:stop]]
        before = [slot for seq, start, stop in spans for slot in self.pages.slots(seq, start - 1, stop - 1)]
        places = [place for _, start, stop in spans for place in range(start, stop)]
        table = torch.tensor([tokens, before, places], device=self.device)
        features, turn = self.features_at(table[1]), self.head.turn(table[2])
        own = slots if len(tokens) == len(slots) else self._slots(spans)
        if len(self.pages.keys) == 1:
            self.pages.put(0, own, *self.head.remember(table[0], features, turn))
        else:
            self.head.step(table[0], features, turn, Pass(self, spans, own))

    def _slots(self, spans: list[tuple[Sequence, int, int]]) -> Tensor:
        slots = [slot for seq, start, stop in spans for slot in self.pages.slots(seq, start, stop)]
        return torch.tensor(slots, device=self.device)

    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Chain]:
        chains = self.chains(budgets)
        if self._whole is not None and all(goes_whole(seq, self.draft_temperature) for seq in seqs):
            depth = max(budget.depth for budget in budgets)
            hang_whole(chains, self._whole.chain([text_of(self.pages, seq, depth) for seq in seqs], depth))
            return chains
        if self._native is None:
            self._step_by_step(seqs, chains, self.features_before(seqs))
        elif self.draft_temperature == "fixed" or self.is_greedy(seqs):
            self._guess_natively(self._native, seqs, chains)
        else:
            self._draw_natively(self._native, seqs, chains, self.features_before(seqs))
        return chains

    def _guess_natively(self, native: NativeChain, seqs: list[Sequence], chains: list[Chain]) -> None:
        """All in one call."""
        draws, tells = draws_of(seqs, max(chain.budget.depth for chain in chains)), any(map(must_draw, seqs))
        features = None if self.pages.kept_features is None else self.features_before(seqs)
        beside = Beside(draws=draws, tells=tells, along=self.along())
        hang(chains, native.guess(self.asked(seqs, chains), features, beside))

    def along(self) -> LaidOut | None:
        """What the library is to read with the first guess that it makes now."""
        return None

    def features_before(self, seqs: list[Sequence]) -> Tensor:
        """Of the places before the last, [texts, width]."""
        slots = [self.pages.slots(seq, len(seq.tokens) - 2, len(seq.tokens) - 1)[0] for seq in seqs]
        return self.features_at(torch.tensor(slots, device=self.device))

    def keep_features(self, slots: Tensor, states: Tensor) -> None:
        """Keep what the target's states are for the steps behind them."""
        self.pages.put_features(slots, self.head.fuse(states))

    def features_at(self, slots: Tensor) -> Tensor:
        """[slots, width]."""
        return self.pages.features(slots)

    def grow(self, plots: list[Plot]) -> None:
        if self._whole is not None:
            plots = grow_whole(plots, self._whole, self.pages, self.draft_temperature, grow_from)
        if plots:
            self._grow_by_levels(plots)

    def _grow_by_levels(self, plots: list[Plot]) -> None:
        native = None if self._native is None else NativeSteps(self._native, self.pages, self.along())
        steps = native or DefinedSteps(self.head, self.pages, plots)
        grow_trees(plots, steps, self.chooser, self.features_before([plot.seq for plot in plots]))

    def _step_by_step(self, seqs: list[Sequence], chains: list[Chain], feature: Tensor) -> None:
        """The definition."""
        depth, lengths = max(chain.budget.depth for chain in chains), [len(seq.tokens) for seq in seqs]
        memory = self.pages.memory(seqs, max(lengths) + depth - 1)
        table = torch.tensor([[seq.tokens[-1] for seq in seqs], lengths], device=self.device)
        tokens = table[0]
        for offset in range(depth):
            look = Look(memory, self.head.config.layer, [length - 1 + offset for length in lengths], ALONE, hidden=1)
            turn = self.head.turn_behind(table[1] + (offset - 1))
            states = self.head.step(tokens, feature, turn, look)
            guesses = self.draw(seqs, offset, self.head.logits(states))
            if not extend(chains, guesses):
                break
            tokens, feature = guesses.tokens, self.head.carry(states)

    def _draw_natively(self, native: NativeChain, seqs: list[Sequence], chains: list[Chain], feature: Tensor) -> None:
        """Of each step the logits; a chain that ended is left out, for it has no pages farther on."""
        beside = Beside(along=self.along())
        for offset in range(max(chain.budget.depth for chain in chains)):
            live = [i for i, chain in enumerate(chains) if chain.goes_on]
            if not live:
                break
            if len(live) < len(chains):
                feature = feature[live]
                seqs, chains = [seqs[i] for i in live], [chains[i] for i in live]
            asked = self.asked(seqs, chains)
            if offset:
                tokens = [chain.tokens[-1] for chain in chains]
                asked = replace(asked, tokens=tokens, places=[place + offset for place in asked.places])
            extend(chains, self.draw(seqs, offset, native.step(asked, feature, beside)))
            beside = NOTHING


class Pass:
    """Attention of places that are read, over those before them; what a head of several layers needs."""

    def __init__(self, drafter: EagleDrafter, spans: list[tuple[Sequence, int, int]], slots: Tensor) -> None:
        self.pages, self.config, self.spans, self.slots = drafter.pages, drafter.head.config.layer, spans, slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pages.put(layer, self.slots, k, v)
        rows = [stop - start for _, start, stop in self.spans]
        pairs = zip(self.spans, torch.split(q, rows), strict=True)
        return torch.cat([self._text(layer, part, *span) for span, part in pairs])

    def _text(self, layer: int, q: Tensor, seq: Sequence, start: int, stop: int) -> Tensor:
        slots = torch.tensor(self.pages.slots(seq, 1, stop), device=q.device)
        keys, values = (t.flatten(0, 1)[slots] for t in (self.pages.keys[layer], self.pages.values[layer]))
        column, row = torch.arange(1, stop, device=q.device), torch.arange(start, stop, device=q.device)[:, None]
        seen = column <= row
        if self.config.window is not None:
            seen &= column > row - self.config.window
        q, keys, values = (t.to(self.pages.keys[layer].dtype).transpose(0, 1)[None] for t in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, seen, scale=self.config.scale, enable_gqa=True)
        return out[0].transpose(0, 1)
