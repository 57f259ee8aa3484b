"""Guesses from what the target itself found likely after the same tokens: what it did not take then may fit now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from foretell.types import Budget, Draft, Outcome, Sequence

from .base import Drafter
from .growing import GrowingTree

Run = tuple[int, ...]

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
        for length in range(len(context), 0, -1):
            row = self._rows.get(context[-length:])
            if row is not None:
                return length, row
        return 0, ()

    def followers(self, context: Run) -> Iterator[tuple[int, float, Run]]:
        """Successors, likeliest first, with their shares and the contexts behind them."""
        length, row = self.find(context)
        shares = self.shares[length - 1]
        for rank in self.ranks[length - 1]:
            if rank < len(row):
                yield row[rank], shares[rank], extended(context, row[rank])

    def learn(self, context: Run, row: Run) -> None:
        """The text itself ended so, and this is what the target found likeliest."""
        for length in range(1, len(context) + 1):
            self._put(context[-length:], row)

    def suppose(self, context: Run, row: Run) -> None:
        """A guess ended so. It may have been wrong, so it tells only where nothing is known."""
        for length in range(1, len(context) + 1):
            if context[-length:] not in self._rows:
                self._put(context[-length:], row)

    def read(self, context: Run, token: int) -> None:
        """`token` followed in a text; it comes first among the successors there are."""
        for length in range(1, len(context) + 1):
            old = self._rows.get(context[-length:], ())
            self._put(context[-length:], (token, *(other for other in old if other != token))[:SUCCESSORS])

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
        table = self._tables.setdefault(tenant, Table(self.runs))
        self._tables.move_to_end(tenant)
        if len(self._tables) > self.tenants:
            self._tables.popitem(last=False)
        return table

    @property
    def memory(self) -> int:
        return sum(table.memory for table in self._tables.values())


class RecycleDrafter(Drafter):
    """Token recycling: a tree of known successors from the text's end on, the likeliest branch first."""

    name = "recycle"
    free = True
    prior = 0.3
    wants_top = SUCCESSORS

    def __init__(self, runs: int = 16_384, tenants: int = 16) -> None:
        """So many runs of tokens are known for each of `tenants`."""
        self.tables = Tables(runs, tenants)

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        return [self._guess(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _guess(self, seq: Sequence, budget: Budget) -> Draft:
        table = self.tables.find(seq.request.tenant)
        if not budget.nodes or table is None:
            return Draft()
        tree = GrowingTree(tuple(seq.tokens[-LONGEST:]), table.followers)
        tree.fill(budget)
        return tree.draft(self.name)

    def observe(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.verdict is not None:
                table = self.tables.use(outcome.share.seq.request.tenant)
                if outcome.share.length == len(outcome.share.seq.request.prompt):  # its first token: once a text
                    _read_prompt(table, outcome.share.seq.request.prompt[-READ:])
                _learn(table, outcome)

    @property
    def memory(self) -> int:
        return self.tables.memory


def extended(context: Run, token: int) -> Run:
    """The tokens that tell what follows, one token later."""
    return (*context[1 - LONGEST :], token)


def _read_prompt(table: Table, prompt: Run) -> None:
    context: Run = ()
    for token in prompt:
        table.read(context, token)
        context = extended(context, token)


def _learn(table: Table, outcome: Outcome) -> None:
    """Every row that was run teaches, accepted or not; what the text itself says stands above what guesses say."""
    share, draft, verdict = outcome.share, outcome.draft, outcome.verdict
    assert verdict is not None, "a step that wrote"
    contexts = [tuple(share.seq.tokens[max(0, share.length - LONGEST) : share.length])]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        contexts.append(extended(contexts[parent + 1], token))
    rows = [0, *(node + 1 for node in verdict.path)]
    tokens = [*(draft.tokens[node] for node in verdict.path), verdict.next_token]
    for row, token in zip(rows, tokens, strict=True):
        table.weigh(contexts[row], token)
    for row, top in enumerate(outcome.top):
        if row not in rows:
            table.suppose(contexts[row], top[:SUCCESSORS])
    for row, token in zip(rows, tokens, strict=True):
        if outcome.top:
            table.learn(contexts[row], outcome.top[row][:SUCCESSORS])
        else:
            table.read(contexts[row], token)
