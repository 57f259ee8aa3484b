"""A draft model whose guesses are made in one go, where its device can."""

from __future__ import annotations

from foretell.sampling.on_device import Draws
from foretell.types import Budget, Draft, Sequence, Share

from .choosing import must_draw
from .model import ModelDrafter, _Chain


class ChainedDrafter(ModelDrafter):
    """Guesses what `ModelDrafter` guesses; a token never visits the host before the next one is made.

    Drawn tokens are as sure as if nothing were left out of the draw, so a chain that has to be likely may end sooner.
    """

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        wishes = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if budget.depth]
        if any(self._goes_by_steps(seq) for seq, _ in wishes):
            return super().propose(seqs, budgets)
        asked = {seq.id for seq, _ in wishes}
        live = [(seq, budget) for seq, budget in wishes if self._ready(seq, budget.depth, asked)]
        if not live:
            return [Draft()] * len(seqs)
        shadows = [self._shadows[seq.id].seq for seq, _ in live]
        shares = [Share.of(shadow, shadow.pending) for shadow in shadows]
        draws = _draws([seq for seq, _ in live])
        found = self.runner.chain(shares, max(budget.depth for _, budget in live), self.vocab, draws)
        if found is None:
            return super().propose(seqs, budgets)
        chains = {seq.id: _Chain() for seq in seqs}
        for (seq, budget), tokens, sure in zip(live, *found, strict=True):
            self._keep(seq, budget, chains[seq.id], tokens, sure)
        return [self._alone(chains[seq.id]) for seq in seqs]

    def _goes_by_steps(self, seq: Sequence) -> bool:
        """Whether guesses come with what they were drawn from, or their temperature hangs on how sure the draft is."""
        return must_draw(seq) or (seq.request.params.temperature > 0 and self.draft_temperature != "fixed")

    def _keep(self, seq: Sequence, budget: Budget, chain: _Chain, tokens: list[int], sure: list[float]) -> None:
        """Of what was guessed as much as would have been asked for, token by token."""
        shadow = self._shadows[seq.id].seq
        for offset, token in enumerate(tokens):
            if not self._goes_on(chain, offset, budget):
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


def _draws(seqs: list[Sequence]) -> Draws | None:
    """How their first guesses are drawn; None where all are the likeliest."""
    params = [seq.request.params for seq in seqs]
    if all(each.temperature == 0 for each in params):
        return None
    return Draws(params, [seq.request.seed for seq in seqs], [len(seq.tokens) for seq in seqs])
