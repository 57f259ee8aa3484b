"""Guesses from what the target itself found likely after the same tokens: what it did not take then may fit now."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush, heapreplace

from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Sequence, StepResult

from .base import Drafter

Run = tuple[int, ...]
Successors = list[tuple[int, float]]  # likeliest first, with their shares
# What may be added next: its chance, the order that decides between equals, its parent, that one's chance, the
# parent's successors, which of them it is, and the tokens before it.
_Bud = tuple[float, int, int, float, Successors, int, Run]

LONGEST = 3  # tokens that tell what follows: where three are known they tell more than two, and two than one
SUCCESSORS = 8
ENTRY = 260  # bytes of a run: its tuple, its entry, and its part of a row that up to three runs share
READ = 4096  # tokens of a prompt, its last ones, that are learnt from
PACE = 0.02  # of what one case changes in the shares

# How often each successor was right, by the length of the run it was known from: measured, and learnt on from there.
SHARES = (
    (0.22, 0.07, 0.05, 0.04, 0.02, 0.02, 0.01, 0.01),
    (0.36, 0.08, 0.05, 0.04, 0.02, 0.02, 0.01, 0.01),
    (0.66, 0.06, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01),
)


class Table:
    """One tenant's: for runs of tokens the successors that the target found likeliest, best first."""

    def __init__(self, runs: int) -> None:
        """At most `runs` are kept, those that were learnt last."""
        self.runs = runs
        self.shares = [list(shares) for shares in SHARES]
        self.ranks = [list(range(SUCCESSORS)) for _ in SHARES]  # by share, the greatest first
        self._rows: OrderedDict[Run, Run] = OrderedDict()

    @property
    def memory(self) -> int:
        return len(self._rows) * ENTRY

    def find(self, context: Run) -> tuple[int, Run]:
        """The length of the longest run that is known and ends `context`, and its successors."""
        for start in range(len(context)):
            row = self._rows.get(context[start:])
            if row is not None:
                return len(context) - start, row
        return 0, ()

    def successors(self, context: Run) -> Successors:
        """What may follow, likeliest first, with their shares."""
        length, row = self.find(context)
        shares, size = self.shares[length - 1], len(row)
        return [(row[rank], shares[rank]) for rank in self.ranks[length - 1] if rank < size]

    def learn(self, context: Run, row: Run) -> None:
        """The text itself ended so, and this is what the target found likeliest."""
        for start in range(len(context)):
            self._put(context[start:], row)

    def suppose(self, context: Run, row: Run) -> None:
        """A guess ended so. It may have been wrong, so it tells only where nothing is known."""
        for start in range(len(context)):
            if context[start:] not in self._rows:
                self._put(context[start:], row)

    def read(self, text: Run, first: int = 0) -> None:
        """These tokens followed one another, from the place `first` on; each comes first among the successors there
        are. Prompts are long: all in one loop."""
        rows, put = self._rows, self._put
        for place in range(first, len(text)):
            token = text[place]
            for start in range(place - LONGEST if place > LONGEST else 0, place):
                run = text[start:place]
                old = rows.get(run)
                if old is None:
                    put(run, (token,))
                elif old[0] == token:
                    rows.move_to_end(run)
                else:
                    put(run, (token, *[other for other in old if other != token])[:SUCCESSORS])

    def weigh(self, context: Run, token: int) -> None:
        """Learn how likely successors are from the one that came."""
        length, row = self.find(context)
        shares = self.shares[length - 1]
        for rank, successor in enumerate(row):
            shares[rank] += PACE * ((successor == token) - shares[rank])
        if row:
            self.ranks[length - 1].sort(key=shares.__getitem__, reverse=True)

    def _put(self, run: Run, row: Run) -> None:
        self._rows[run] = row
        self._rows.move_to_end(run)
        if len(self._rows) > self.runs:
            self._rows.popitem(last=False)


class Tables:
    """A table for each tenant: what one's texts taught is never shown to another."""

    def __init__(self, runs: int, tenants: int) -> None:
        self.runs, self.tenants = runs, tenants
        self._tables: OrderedDict[str, Table] = OrderedDict()  # least recently used first

    def find(self, tenant: str) -> Table | None:
        return self._tables.get(tenant)

    def use(self, tenant: str) -> Table:
        table = self._tables.get(tenant)
        if table is None:
            table = self._tables[tenant] = Table(self.runs)
        self._tables.move_to_end(tenant)
        if len(self._tables) > self.tenants:
            self._tables.popitem(last=False)
        return table

    @property
    def memory(self) -> int:
        return sum(table.memory for table in self._tables.values())


class TokenRecyclingDrafter(Drafter):
    """Token recycling: a tree of known successors from the text's end on, the likeliest branch first."""

    name = "recycle"
    traits = DrafterTraits(is_free=True, prior_acceptance=0.3, top_k=SUCCESSORS, defers_to_confident=True)

    def __init__(self, runs: int = 16_384, tenants: int = 16) -> None:
        """So many runs of tokens are known for each of `tenants`."""
        self.tables = Tables(runs, tenants)
        self._unread: set[int] = set()  # texts whose prompts are read with their second token
        self._read: set[int] = set()  # and those that were read before their first one

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._guess(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _guess(self, seq: Sequence, budget: Budget) -> Draft:
        table = self.tables.find(seq.request.tenant)
        if not budget.nodes or table is None:
            return NO_DRAFT
        return _likeliest(table, tuple(seq.tokens[-LONGEST:]), budget, self.name)

    def prepare(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq.id not in self._read:
                self._read.add(seq.id)
                self.tables.use(seq.request.tenant).read(seq.request.prompt[-READ:])

    def observe(self, outcomes: list[StepResult]) -> None:
        for outcome in outcomes:
            if outcome.verify_result is not None:
                table = self.tables.use(outcome.scheduled.seq.request.tenant)
                seq = outcome.scheduled.seq
                if outcome.scheduled.length == len(seq.request.prompt):  # its first token, which waits for nobody
                    if seq.id not in self._read:
                        self._unread.add(seq.id)
                elif seq.id in self._unread:
                    self._unread.remove(seq.id)
                    table.read(seq.request.prompt[-READ:])
                _learn(table, outcome)

    def forget(self, seq: Sequence) -> None:
        self._unread.discard(seq.id)
        self._read.discard(seq.id)

    @property
    def memory(self) -> int:
        return self.tables.memory


def _likeliest(table: Table, start: Run, budget: Budget, source: str) -> Draft:
    """The tree whose nodes are likeliest to stand, the likeliest first, so that its beginning is the tree for less:
    what `GrowingTree` makes of `followers`, in one loop, because it runs in every step."""
    tokens: list[int] = []
    parents: list[int] = []
    sure: list[float] = []
    buds: list[_Bud] = []
    offered = 0
    node, chance, context = -1, 1.0, start
    while True:
        kids = table.successors(context)
        if kids:  # the likeliest of them waits to be added; the next takes its place when it is
            heappush(buds, (-chance * kids[0][1], offered, node, chance, kids, 0, context))
            offered += 1
        if not buds or len(tokens) == budget.nodes or -buds[0][0] < budget.min_probability:
            return Draft(tuple(tokens), tuple(parents), source, None, tuple(sure)) if tokens else NO_DRAFT
        chance, _, parent, before, kids, at, context = buds[0]
        token, share = kids[at]
        if at + 1 < len(kids):
            heapreplace(buds, (-before * kids[at + 1][1], offered, parent, before, kids, at + 1, context))
            offered += 1
        else:
            heappop(buds)
        node, chance, context = len(tokens), -chance, (*context[1 - LONGEST :], token)
        tokens.append(token)
        parents.append(parent)
        sure.append(share)


def extended(context: Run, token: int) -> Run:
    """The tokens that tell what follows, one token later."""
    return (*context[1 - LONGEST :], token)


def _learn(table: Table, outcome: StepResult) -> None:
    """Every row that was run teaches, accepted or not; what the text itself says stands above what guesses say."""
    share, draft, verdict = outcome.scheduled, outcome.draft, outcome.verify_result
    assert verdict is not None, "a step that wrote"
    context = tuple(share.seq.tokens[max(0, share.length - LONGEST) : share.length])
    rows = [0, *(node + 1 for node in verdict.accepted_path)]
    tokens = [*(draft.tokens[node] for node in verdict.accepted_path), verdict.next_token]
    if not outcome.top_tokens:  # the text is copied: it is read on, and no shares are learnt from what everybody knew
        table.read((*context, *tokens), len(context))
        return
    contexts = [context]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        contexts.append(extended(contexts[parent + 1], token))
    for row, token in zip(rows, tokens, strict=True):
        table.weigh(contexts[row], token)
    for row, top in enumerate(outcome.top_tokens):
        if row not in rows:
            table.suppose(contexts[row], top[:SUCCESSORS])
    for row in rows:
        table.learn(contexts[row], outcome.top_tokens[row][:SUCCESSORS])
