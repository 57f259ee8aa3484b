"""A draft model whose guesses are made in one go, where its device can."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from foretell.draft.heads.sampling import must_draw
from foretell.runner.cuda.graph_shapes import MAX_CHAIN_PREFILL
from foretell.runner.executor import PendingChains
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.types import NO_DRAFT, Budget, Draft, ScheduledSequence, Sequence

from .model import ModelDrafter, _Chain


class GraphModelDrafter(ModelDrafter):
    """Guesses what `ModelDrafter` guesses; a token never visits the host before the next one is made.

    Drawn tokens are as sure as if nothing were left out of the draw, so a chain that has to be likely may end sooner.
    Guesses that have to tell what they were drawn from are made step by step.
    """

    whole, draws_whole = True, False

    def __init__(self, runner: ModelRunner, *settings: Any, **named: Any) -> None:
        """As `ModelDrafter`."""
        super().__init__(runner, *settings, **named)
        self.unseen_on = str(runner.device)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        wishes = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if budget.depth]
        if any(self._goes_by_steps(seq) for seq, _ in wishes):
            return super().propose(seqs, budgets)
        asked = {seq.id for seq, _ in wishes}
        live = [(seq, budget) for seq, budget in wishes if self._ready(seq, budget.depth, asked)]
        if not live:
            return [Draft()] * len(seqs)
        shadows = [self._shadows[seq.id].seq for seq, _ in live]
        self._read(shadows)
        shares = [ScheduledSequence.of(shadow, shadow.pending) for shadow in shadows]
        draws = _draws([seq for seq, _ in live])
        found = self.runner.draft_chain(shares, max(budget.depth for _, budget in live), self.vocab, draws)
        if found is None:
            return super().propose(seqs, budgets)
        if all(budget.on_device for _, budget in live):
            left = _Left(self, found, live)
            drafts = {seq.id: self._unseen(left, text, budget) for text, (seq, budget) in enumerate(live)}
            return [drafts.get(seq.id, NO_DRAFT) for seq in seqs]
        chains = self._kept(live, found)
        return [self._alone(chains.get(seq.id, _Chain())) for seq in seqs]

    def _kept(self, live: list[tuple[Sequence, Budget]], found: PendingChains) -> dict[int, _Chain]:
        """By sequence what was guessed, when it is known."""
        chains = {seq.id: _Chain() for seq, _ in live}
        for (seq, budget), tokens, sure in zip(live, *found.wait(), strict=True):
            if seq.id in self._shadows:  # else it has gone since they were asked for
                self._keep(seq, budget, chains[seq.id], tokens, sure)
        return chains

    def _unseen(self, left: _Left, text: int, budget: Budget) -> Draft:
        """All nodes that were asked for: nobody knows how likely they are."""
        places = left.found.token_indices(text, budget.depth)
        parents = tuple(range(-1, len(places) - 1))
        return Draft(tuple(-1 - place for place in places), parents, self.name, device_draft=_Unseen(left, text))

    def _read(self, shadows: list[Sequence]) -> None:
        """What there is to read of new texts is read by itself: a chain of any length behind many rows would be a
        recording of its own."""
        self._prefill(shadows)
        new = [shadow for shadow in shadows if shadow.pending > MAX_CHAIN_PREFILL]
        if new:
            self.runner.forward(
                [ScheduledSequence.of(shadow, shadow.pending - 1) for shadow in new], [NO_DRAFT] * len(new)
            )
            for shadow in new:
                shadow.cached = len(shadow.tokens) - 1

    def _goes_by_steps(self, seq: Sequence) -> bool:
        """Whether guesses come with what they were drawn from, or their temperature hangs on how sure the draft is."""
        return must_draw(seq) or (seq.request.params.temperature > 0 and self.draft_temperature != "fixed")

    def _keep(self, seq: Sequence, budget: Budget, chain: _Chain, tokens: list[int], sure: list[float]) -> None:
        """Of what was guessed as much as would have been asked for, token by token."""
        shadow = self._shadows[seq.id].seq
        for offset, token in enumerate(tokens):
            if not (offset < budget.depth if budget.on_device else self._goes_on(chain, offset, budget)):
                break
            shadow.cached = len(shadow.tokens)
            shadow.tokens.append(token)
            chain.tokens.append(token)
            chain.confidence.append(sure[offset])
            chain.sureness *= sure[offset]

    def _alone(self, chain: _Chain) -> Draft:
        """Without distributions: nothing was drawn but by the text's own noise, by which the target will draw."""
        parents = tuple(range(-1, len(chain.tokens) - 1))
        return Draft(tuple(chain.tokens), parents, self.name, None, tuple(chain.confidence)) if parents else Draft()


class _Left:
    """Guesses of a step that lie on the device; the drafter takes note of all of them when the first is asked for."""

    def __init__(self, drafter: GraphModelDrafter, found: PendingChains, live: list[tuple[Sequence, Budget]]) -> None:
        self.drafter, self.found, self.live = drafter, found, live

    @cached_property
    def chains(self) -> list[_Chain]:
        return list(self.drafter._kept(self.live, self.found).values())


@dataclass(frozen=True)
class _Unseen:
    """One text's."""

    left: _Left
    text: int

    @property
    def token_buffer(self) -> Tensor:
        return self.left.found.token_buffer

    def wait(self) -> tuple[list[int], list[float]]:
        chain = self.left.chains[self.text]
        return chain.tokens, chain.confidence


def _draws(seqs: list[Sequence]) -> SamplingBatch | None:
    """How their first guesses are drawn; None where all are the likeliest."""
    params = [seq.request.params for seq in seqs]
    if all(each.temperature == 0 for each in params):
        return None
    return SamplingBatch(params, [seq.request.seed for seq in seqs], [len(seq.tokens) for seq in seqs])
