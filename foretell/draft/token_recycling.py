"""Token recycling: drafts from the target's own top-k candidates after the same tokens (Luo et al. 2024)."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush, heapreplace

from foretell.draft.base import Drafter
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence, StepResult

NGram = tuple[int, ...]
Successors = list[tuple[int, float]]  # token and probability, most likely first
# A candidate node on the heap: negative path probability, a count that breaks ties, parent, the parent's path
# probability, the parent's successors, which of them it is, and the n-gram before it.
_Candidate = tuple[float, int, int, float, Successors, int, NGram]

MAX_CONTEXT = 3  # tokens of an n-gram: three predict better than two, where they are known, and two than one
NUM_SUCCESSORS = 8  # kept for each n-gram
ENTRY_BYTES = 260  # of an n-gram: its tuple, its dict entry and its part of a row that up to three n-grams share
PROMPT_TOKENS = 4096  # last tokens of a prompt that are learned
LEARNING_RATE = 0.02  # of the probabilities by rank (exponential moving average)

# Probability of each rank by the length of the n-gram: measured once, and learned on from there.
RANK_PROBABILITIES = (
    (0.22, 0.07, 0.05, 0.04, 0.02, 0.02, 0.01, 0.01),
    (0.36, 0.08, 0.05, 0.04, 0.02, 0.02, 0.01, 0.01),
    (0.66, 0.06, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01),
)


class SuccessorTable:
    """The most likely successors of n-grams, by the target's own logits, for one tenant."""

    def __init__(self, max_ngrams: int) -> None:
        """The `max_ngrams` that were learned last are kept."""
        self.max_ngrams = max_ngrams
        self.probabilities = [list(each) for each in RANK_PROBABILITIES]  # by n-gram length and rank
        self.rank_order = [list(range(NUM_SUCCESSORS)) for _ in RANK_PROBABILITIES]  # most likely rank first
        self._rows: OrderedDict[NGram, NGram] = OrderedDict()

    @property
    def memory(self) -> int:
        """Return an estimate of the table's size in bytes."""
        return len(self._rows) * ENTRY_BYTES

    def find(self, context: NGram) -> tuple[int, NGram]:
        """Return the length of the longest known n-gram that ends `context`, and its successors."""
        for start in range(len(context)):
            row = self._rows.get(context[start:])
            if row is not None:
                return len(context) - start, row
        return 0, ()

    def successors(self, context: NGram) -> Successors:
        """Return what may follow, most likely first."""
        length, row = self.find(context)
        probabilities, size = self.probabilities[length - 1], len(row)
        return [(row[rank], probabilities[rank]) for rank in self.rank_order[length - 1] if rank < size]

    def learn(self, context: NGram, row: NGram) -> None:
        """Store the target's top-k after tokens of the sequence."""
        for start in range(len(context)):
            self._put(context[start:], row)

    def learn_if_unknown(self, context: NGram, row: NGram) -> None:
        """Store the target's top-k after draft tokens, which may be wrong, only where nothing is known."""
        for start in range(len(context)):
            if context[start:] not in self._rows:
                self._put(context[start:], row)

    def learn_text(self, tokens: NGram, first: int = 0) -> None:
        """Learn that these tokens follow each other, from index `first` on: each becomes the first successor.

        One loop, because prompts are long.
        """
        rows, put = self._rows, self._put
        for index in range(first, len(tokens)):
            token = tokens[index]
            for start in range(index - MAX_CONTEXT if index > MAX_CONTEXT else 0, index):
                ngram = tokens[start:index]
                old = rows.get(ngram)
                if old is None:
                    put(ngram, (token,))
                elif old[0] == token:
                    rows.move_to_end(ngram)
                else:
                    put(ngram, (token, *[other for other in old if other != token])[:NUM_SUCCESSORS])

    def update_probabilities(self, context: NGram, token: int) -> None:
        """Update the probabilities by rank with the token that followed."""
        length, row = self.find(context)
        probabilities = self.probabilities[length - 1]
        for rank, successor in enumerate(row):
            probabilities[rank] += LEARNING_RATE * ((successor == token) - probabilities[rank])
        if row:
            self.rank_order[length - 1].sort(key=probabilities.__getitem__, reverse=True)

    def _put(self, ngram: NGram, row: NGram) -> None:
        self._rows[ngram] = row
        self._rows.move_to_end(ngram)
        if len(self._rows) > self.max_ngrams:
            self._rows.popitem(last=False)


class TenantTables:
    """A table for each tenant: what one tenant's requests taught never reaches another's."""

    def __init__(self, max_ngrams: int, tenants: int) -> None:
        self.max_ngrams, self.tenants = max_ngrams, tenants
        self._tables: OrderedDict[str, SuccessorTable] = OrderedDict()  # least recently used first

    def find(self, tenant: str) -> SuccessorTable | None:
        """Return the table of a tenant, if there is one."""
        return self._tables.get(tenant)

    def use(self, tenant: str) -> SuccessorTable:
        """Return the table of a tenant, created if missing, and mark it as recently used."""
        table = self._tables.get(tenant)
        if table is None:
            table = self._tables[tenant] = SuccessorTable(self.max_ngrams)
        self._tables.move_to_end(tenant)
        if len(self._tables) > self.tenants:
            self._tables.popitem(last=False)
        return table

    @property
    def memory(self) -> int:
        """Return an estimate of the size of all tables in bytes."""
        return sum(table.memory for table in self._tables.values())


class TokenRecyclingDrafter(Drafter):
    """Drafts a tree of known successors from the end of the sequence on, the most likely node first."""

    name = "recycle"
    traits = DrafterTraits(is_free=True, prior_acceptance=0.3, top_k=NUM_SUCCESSORS, defers_to_confident=True)

    def __init__(self, max_ngrams: int = 16_384, tenants: int = 16) -> None:
        """`max_ngrams` are kept for each of `tenants`."""
        self.tables = TenantTables(max_ngrams, tenants)
        self._prompt_pending: set[int] = set()  # sequences whose prompt is learned with their second token
        self._prompt_learned: set[int] = set()  # and those whose prompt was learned before their first

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _draft(self, seq: Sequence, budget: Budget) -> Draft:
        table = self.tables.find(seq.request.tenant)
        if not budget.nodes or table is None:
            return NO_DRAFT
        return _best_first_draft(table, tuple(seq.tokens[-MAX_CONTEXT:]), budget, self.name)

    def prepare(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq.id not in self._prompt_learned:
                self._prompt_learned.add(seq.id)
                self.tables.use(seq.request.tenant).learn_text(seq.request.prompt[-PROMPT_TOKENS:])

    def observe(self, results: list[StepResult]) -> None:
        for result in results:
            if result.verify_result is not None:
                seq = result.scheduled.seq
                table = self.tables.use(seq.request.tenant)
                if result.scheduled.length == len(seq.request.prompt):  # the first token must not wait for the prompt
                    if seq.id not in self._prompt_learned:
                        self._prompt_pending.add(seq.id)
                elif seq.id in self._prompt_pending:
                    self._prompt_pending.remove(seq.id)
                    table.learn_text(seq.request.prompt[-PROMPT_TOKENS:])
                _learn(table, result)

    def forget(self, seq: Sequence) -> None:
        self._prompt_pending.discard(seq.id)
        self._prompt_learned.discard(seq.id)

    @property
    def memory(self) -> int:
        """Return an estimate of the size of all tables in bytes."""
        return self.tables.memory


def _best_first_draft(table: SuccessorTable, context: NGram, budget: Budget, source: str) -> Draft:
    """Return the tree of the most likely nodes, most likely first, so that a prefix is the tree of a smaller budget.

    Equal to `BestFirstTree` over `successors`, written as one loop because it runs in every step.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    heap: list[_Candidate] = []
    num_pushed = 0
    node, path = -1, 1.0
    while True:
        successors = table.successors(context)
        if successors:  # only the most likely one waits; the next takes over when it is added
            heappush(heap, (-path * successors[0][1], num_pushed, node, path, successors, 0, context))
            num_pushed += 1
        if not heap or len(tokens) == budget.nodes or -heap[0][0] < budget.min_probability:
            return Draft(tuple(tokens), tuple(parents), source, None, tuple(confidence)) if tokens else NO_DRAFT
        negative, _, parent, above, successors, rank, context = heap[0]
        token, probability = successors[rank]
        if rank + 1 < len(successors):
            entry = (-above * successors[rank + 1][1], num_pushed, parent, above, successors, rank + 1, context)
            heapreplace(heap, entry)
            num_pushed += 1
        else:
            heappop(heap)
        node, path, context = len(tokens), -negative, (*context[1 - MAX_CONTEXT :], token)
        tokens.append(token)
        parents.append(parent)
        confidence.append(probability)


def extend_context(context: NGram, token: int) -> NGram:
    """Return the context one token later."""
    return (*context[1 - MAX_CONTEXT :], token)


def _learn(table: SuccessorTable, result: StepResult) -> None:
    """Learn from every row of a step, accepted or not; rows of the sequence itself overrule rows of draft tokens."""
    scheduled, draft, verify_result = result.scheduled, result.draft, result.verify_result
    assert verify_result is not None, "the step generated a token"
    context = tuple(scheduled.seq.tokens[max(0, scheduled.length - MAX_CONTEXT) : scheduled.length])
    rows = [0, *(node + 1 for node in verify_result.accepted_path)]
    tokens = [*(draft.tokens[node] for node in verify_result.accepted_path), verify_result.next_token]
    if not result.top_tokens:  # the sequence is being copied: learn its tokens, but no probabilities from them
        table.learn_text((*context, *tokens), len(context))
        return
    contexts = [context]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        contexts.append(extend_context(contexts[parent + 1], token))
    for row, token in zip(rows, tokens, strict=True):
        table.update_probabilities(contexts[row], token)
    for row, top in enumerate(result.top_tokens):
        if row not in rows:
            table.learn_if_unknown(contexts[row], top[:NUM_SUCCESSORS])
    for row in rows:
        table.learn(contexts[row], result.top_tokens[row][:NUM_SUCCESSORS])
