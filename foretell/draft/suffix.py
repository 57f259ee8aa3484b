"""SuffixDecoding: copies the most frequent continuation of the sequence's suffix, from the sequence itself or from
earlier outputs of its tenant (Oliaro et al. 2024)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from foretell.draft.base import Drafter
from foretell.draft.ngram import SEPARATOR, Match, NGramIndex, chain_draft, copy_tokens
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence, StepResult

MAX_LENGTHS = 4  # match lengths tried for a draft, longest first
RESUME_MATCH = 6  # tokens that must match before one that differs, for the copy to resume after it
RESUME_CONFIDENCE = 0.5  # factor on the confidence of such a copy


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


class _Path(NamedTuple):
    """A candidate draft: a continuation of a suffix match."""

    tokens: list[int]
    confidence: list[float]  # of each token, given those before it
    score: float  # expected accepted tokens


EMPTY_PATH = _Path([], [], 0.0)


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
        self.factor, self.offset, self.min_token_prob = factor, offset, min_token_prob
        self.store = OutputStore(store_tokens, tenants)
        self._indices: dict[int, NGramIndex] = {}  # of running sequences

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._draft(seq, budget.depth) for seq, budget in zip(seqs, budgets, strict=True)]

    def prepare(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._index(seq)

    def observe(self, results: list[StepResult]) -> None:
        """Mark tenants with running sequences as used. Proposing must not: drafts would depend on who asked."""
        for tenant in dict.fromkeys(result.scheduled.seq.request.tenant for result in results):
            self.store.touch(tenant)

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq.id, None)
        if seq.finish_reason in ("stop", "length"):
            self.store.add(seq.request.tenant, seq.tokens[len(seq.request.prompt) :])

    @property
    def memory(self) -> int:
        """Bytes of the stored outputs and of the running sequences' indices."""
        return self.store.memory + sum(index.memory for index in self._indices.values())

    def _index(self, seq: Sequence) -> NGramIndex:
        """Return the index of a sequence, up to date."""
        index = self._indices.get(seq.id)
        if index is None:
            index = self._indices[seq.id] = NGramIndex(seq.tokens)
        index.catch_up()
        return index

    def _draft(self, seq: Sequence, nodes: int) -> Draft:
        if not nodes:
            return NO_DRAFT
        own = self._index(seq)
        length, tokens = len(seq.tokens), seq.tokens
        best = EMPTY_PATH
        for index in (own, *self.store.indices(seq.request.tenant)):  # the sequence itself wins ties
            best = self._better(index, index.matches(tokens, length), nodes, best, skipped=0)
        if best is EMPTY_PATH:  # perhaps the sequence resumes copying after one token that differs
            before = own.matches(tokens, length - 1)
            long = [match for match in before if match[0] >= RESUME_MATCH and match[1] + 1 < length]
            best = self._better(own, long, nodes, best, skipped=1)
        if best.score < 1:
            for index in (own, *self.store.indices(seq.request.tenant)):
                single = [(1, position) for position in index.after(tokens[-1])]
                best = self._better(index, single, nodes, best, skipped=0)
        return chain_draft(best.tokens, best.confidence, self.name) if best.tokens else NO_DRAFT

    def _better(self, index: NGramIndex, matches: list[Match], nodes: int, best: _Path, skipped: int) -> _Path:
        """Return the better of `best` and what follows the matches; a shorter match must score higher."""
        if not matches:
            return best
        for length in sorted({match[0] for match in matches}, reverse=True)[:MAX_LENGTHS]:
            max_tokens = min(nodes, int(self.factor * length + self.offset))
            if max_tokens <= best.score:
                break
            positions = [position + skipped for matched, position in matches if matched >= length]
            path = self._follow(index.tokens, positions, max_tokens)
            if path.score > best.score:
                confidence = (1 - 1 / (1 + length)) * (RESUME_CONFIDENCE if skipped else 1.0)
                best = _Path(path.tokens, [share * confidence for share in path.confidence], path.score)
        return best

    def _follow(self, tokens: list[int], positions: list[int], max_tokens: int) -> _Path:
        """Return the most frequent continuation of these positions; of equally frequent tokens the latest."""
        path: list[int] = []
        confidence: list[float] = []
        path_probability, score = 1.0, 0.0
        while len(path) < max_tokens:
            if len(positions) == 1:
                rest = copy_tokens(tokens, positions[0], max_tokens)[len(path) :]
                return _Path(path + rest, confidence + [1.0] * len(rest), score + path_probability * len(rest))
            found = [_token_at(tokens, position, len(path)) for position in positions]
            token, count = max(Counter(found).items(), key=lambda vote: vote[1])
            path_probability *= count / len(positions)
            if token == SEPARATOR or path_probability < self.min_token_prob:
                break
            path.append(token)
            confidence.append(count / len(positions))
            score += path_probability
            positions = [position for position, after in zip(positions, found, strict=True) if after == token]
        return _Path(path, confidence, score)


def _token_at(tokens: list[int], position: int, offset: int) -> int:
    """Return the token at position + offset; past the end the copy repeats, as a loop would."""
    index, size = position + offset, len(tokens)
    return tokens[index] if index < size else tokens[position + (index - size) % (size - position)]
