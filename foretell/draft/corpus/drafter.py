"""Copies from files that the operator named, such as the repository that an agent works on."""

from __future__ import annotations

from collections.abc import Sequence as Values
from typing import Protocol

from foretell.draft.base import Drafter
from foretell.draft.continuation import EMPTY_PATH, RESUME_MATCH, Continuations
from foretell.draft.ngram import SEPARATOR, chain_draft
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence

from .context_index import ContextIndex


class IndexedCorpus(Protocol):
    """Indexed documents, of which each tenant may draft from its own."""

    def indices(self, tenant: str) -> Values[ContextIndex]:
        """Return the indices of what this tenant may draft from, as they are now."""


class CorpusDrafter(Drafter):
    """Drafts the continuation of the longest match in the files; longer matches draft further.

    It keeps no state. A draft depends on the tokens, the tenant and the version of the files at the time of the call.
    """

    name = "corpus"
    traits = DrafterTraits(is_free=True, defers_to_confident=True)

    def __init__(self, corpus: IndexedCorpus, continuations: Continuations = Continuations()) -> None:
        self.corpus, self.continuations = corpus, continuations

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._draft(seq, budget.depth) for seq, budget in zip(seqs, budgets, strict=True)]

    def _draft(self, seq: Sequence, nodes: int) -> Draft:
        if not nodes:
            return NO_DRAFT
        best, better = EMPTY_PATH, self.continuations.better
        length, tokens = len(seq.tokens), seq.tokens
        indices = self.corpus.indices(seq.request.tenant)  # one version for the whole draft
        for index in indices:
            best = better(index.tokens, index.matches(tokens, length), nodes, best)
        if best.score < 1:  # perhaps the sequence resumes copying after one token that differs
            for index in indices:
                before = index.matches(tokens, length - 1)
                long = [each for each in before if each[0] >= RESUME_MATCH and index.tokens[each[1]] != SEPARATOR]
                best = better(index.tokens, long, nodes, best, skipped=1)
        return chain_draft(best.tokens, best.confidence, self.name) if best.tokens else NO_DRAFT
