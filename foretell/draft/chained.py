"""A draft model whose greedy guesses are made in one go, where its device can."""

from __future__ import annotations

from foretell.types import Budget, Draft, Sequence, Share

from .model import ModelDrafter, _Chain


class ChainedDrafter(ModelDrafter):
    """Guesses what `ModelDrafter` guesses; a token never visits the host before the next one is made. Where tokens are
    drawn it goes step by step."""

    whole, draws_whole = True, False

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        wishes = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if budget.depth]
        if any(seq.request.params.temperature > 0 for seq, _ in wishes):
            return super().propose(seqs, budgets)
        asked = {seq.id for seq, _ in wishes}
        live = [(seq, budget) for seq, budget in wishes if self._ready(seq, budget.depth, asked)]
        if not live:
            return [Draft()] * len(seqs)
        shadows = [self._shadows[seq.id].seq for seq, _ in live]
        shares = [Share.of(shadow, shadow.pending) for shadow in shadows]
        found = self.runner.chain(shares, max(budget.depth for _, budget in live), self.vocab)
        if found is None:
            return super().propose(seqs, budgets)
        chains = {seq.id: _Chain() for seq in seqs}
        for (seq, budget), tokens, sure in zip(live, *found, strict=True):
            self._keep(seq, budget, chains[seq.id], tokens, sure)
        return [self._greedy(chains[seq.id]) for seq in seqs]

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

    def _greedy(self, chain: _Chain) -> Draft:
        """Nothing was drawn, so no distribution is needed."""
        parents = tuple(range(-1, len(chain.tokens) - 1))
        return Draft(tuple(chain.tokens), parents, self.name, None, tuple(chain.confidence)) if parents else Draft()
