"""SuffixDecoding: copies the most frequent continuation of the sequence's suffix, from the sequence itself or from
earlier outputs of its tenant (Oliaro et al. 2024)."""

from __future__ import annotations

from collections import OrderedDict

from foretell.draft.base import Drafter
from foretell.draft.continuation import EMPTY_PATH, RESUME_MATCH, Continuations
from foretell.draft.ngram import SEPARATOR, NGramIndex, SequenceIndices, chain_draft
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence, StepResult


class OutputStore:
    """Finished outputs of each tenant in two generations: when the newer one is full, the older one is dropped.

    Single outputs cannot be removed from an index without rebuilding it.
    """

    def __init__(self, tokens: int, tenants: int) -> None:
        self.generation_tokens, self.tenants = tokens // 2, tenants
        self._generations: OrderedDict[str, list[NGramIndex]] = OrderedDict()  # least recently used first

    def add(self, tenant: str, output: list[int]) -> None:
        """Store the end of an output."""
        output = output[-self.generation_tokens + 1 :] if self.generation_tokens > 1 else []
        if not output or not self.tenants:
            return
        generations = self._generations.setdefault(tenant, [NGramIndex()])
        self.touch(tenant)
        if len(generations[0]) + len(output) + 1 > self.generation_tokens:
            generations[:] = [NGramIndex(), generations[0]]
        generations[0].tokens += [*output, SEPARATOR]
        generations[0].catch_up()
        if len(self._generations) > self.tenants:
            self._generations.popitem(last=False)

    def touch(self, tenant: str) -> None:
        """Mark a tenant as recently used."""
        if tenant in self._generations:
            self._generations.move_to_end(tenant)

    def indices(self, tenant: str) -> list[NGramIndex]:
        """Return the indices of a tenant's outputs, newest first."""
        return self._generations.get(tenant, [])

    @property
    def memory(self) -> int:
        """Return the size of all indices in bytes."""
        return sum(index.memory for generations in self._generations.values() for index in generations)


class SuffixDrafter(Drafter):
    """Drafts the match with the most expected accepted tokens; longer matches draft further."""

    name = "suffix"
    traits = DrafterTraits(is_free=True)

    def __init__(
        self,
        factor: float = 1.0,
        offset: float = 1.0,
        min_token_prob: float = 0.1,
        store_tokens: int = 65_536,
        tenants: int = 16,
    ) -> None:
        """A match of m tokens drafts at most `factor` * m + `offset` tokens. `store_tokens` are kept per tenant."""
        self.continuations = Continuations(factor, offset, min_token_prob)
        self.store = OutputStore(store_tokens, tenants)
        self._indices = SequenceIndices()
        self._references: dict[int, NGramIndex] = {}  # of the requests that have one, by sequence

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._draft(seq, budget.depth) for seq, budget in zip(seqs, budgets, strict=True)]

    def prepare(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._indices.current(seq)
            self._reference(seq)

    def observe(self, results: list[StepResult]) -> None:
        """Mark tenants with running sequences as used. Proposing must not: drafts would depend on who asked."""
        for tenant in dict.fromkeys(result.scheduled.seq.request.tenant for result in results):
            self.store.touch(tenant)

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq.id, None)
        self._references.pop(seq.id, None)
        if seq.finish_reason in ("stop", "length"):
            self.store.add(seq.request.tenant, seq.tokens[len(seq.request.prompt) :])

    @property
    def memory(self) -> int:
        """Bytes of the stored outputs and of the running sequences' indices."""
        own = (*self._indices.values(), *self._references.values())
        return self.store.memory + sum(index.memory for index in own)

    def _reference(self, seq: Sequence) -> list[NGramIndex]:
        """Return the index of what the request says that it may quote."""
        if not seq.request.reference:
            return []
        index = self._references.get(seq.id)
        if index is None:
            index = self._references[seq.id] = NGramIndex([*seq.request.reference, SEPARATOR])
            index.catch_up()
        return [index]

    def _draft(self, seq: Sequence, nodes: int) -> Draft:
        if not nodes:
            return NO_DRAFT
        own = self._indices.current(seq)
        length, tokens = len(seq.tokens), seq.tokens
        best, better = EMPTY_PATH, self.continuations.better
        others = (*self._reference(seq), *self.store.indices(seq.request.tenant))
        for index in (own, *others):  # the sequence itself wins ties
            best = better(index.tokens, index.matches(tokens, length), nodes, best)
        if best is EMPTY_PATH:  # perhaps the sequence resumes copying after one token that differs
            before = own.matches(tokens, length - 1)
            long = [match for match in before if match[0] >= RESUME_MATCH and match[1] + 1 < length]
            best = better(own.tokens, long, nodes, best, skipped=1)
        if best.score < 1:
            for index in (own, *others):
                single = [(1, position) for position in index.after(tokens[-1])]
                best = better(index.tokens, single, nodes, best)
        return chain_draft(best.tokens, best.confidence, self.name) if best.tokens else NO_DRAFT
