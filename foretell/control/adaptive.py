"""Guesses as far as it pays, by what steps cost here and what stood in this request; not at all where it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from foretell.types import Budget, Draft, Outcome, Sequence, Share, StepTimes

from .acceptance import Acceptance, Ledger, cell
from .controller import Controller, Offers
from .costs import DraftCosts, StepCosts
from .decisions import LOW_ACCEPT, NO_GUESS, NOT_ASKED, UNKNOWN, Decisions, advice
from .probes import Probes
from .spending import Candidate, Market, Plan, best_plan, break_even, share_out

SMALL = 64  # rows of a prompt that are counted in a step to be planned; a prompt's chunk is not known yet
STRETCH_EVERY = 24  # of so many drafts one goes a node farther
UNTRIED = 4  # nodes of a drafter that has hardly been tried, and 16 tokens over which its reading must pay
ASK_SHARE = 0.005  # of the time may go into looking at guesses that are not taken
PATIENCE, LONGEST_WAIT = 16, 16  # looks in vain until a sequence is looked at less often, and how seldom at last
READ_AHEAD = 64  # tokens over which it must pay that a drafter has to read the text first
KNOWN_WELL = 64  # steps after which a further one of the same kind teaches little, and only every fourth is learnt


@dataclass(frozen=True)
class ArmTraits:
    """What the controller knows of a drafter at first sight: whether it guesses for nothing, whether it must read the
    text itself, what a node costs, as a share of a plain step, and how often a guess should stand."""

    free: bool = False
    reads: bool = False
    share: float = 0.3
    prior: float = 0.5


@dataclass(frozen=True)
class Settings:
    """How the controller may act. `fixed` gives the nodes for a batch of so many, where lengths are not adapted."""

    most: int = 16
    fixed: Callable[[int], int] | None = None
    throughput: bool = False
    shortest: int = 0  # drafts of fewer nodes are not checked
    margin: float = 0.01


@dataclass(slots=True)
class _Patience:
    """How long a sequence was looked at in vain, and how many steps it is left alone for that."""

    vain: int = 0
    wait: int = 0


class AdaptiveController(Controller):
    """Maximises expected tokens per second over the whole batch. It looks at the past and at free guesses alone."""

    def __init__(
        self,
        arms: Mapping[str, ArmTraits],
        settings: Settings = Settings(),
        costs: StepCosts | None = None,
    ) -> None:
        self.arms, self.settings = dict(arms), settings
        self.costs = costs or StepCosts()
        self.draft_costs = {name: DraftCosts(traits.share) for name, traits in arms.items()}
        self.acceptance = Acceptance({name: traits.prior for name, traits in arms.items()})
        self.decisions = Decisions()
        self.probes = Probes()
        self._free = frozenset(name for name, traits in arms.items() if traits.free)
        self._patience: dict[int, _Patience] = {}
        self._read: dict[tuple[int, str], int] = {}  # tokens a drafter has read of a sequence
        self._drafts: Counter[str] = Counter()
        self._expected: dict[int, tuple[float, ...]] = {}  # by sequence: how likely the nodes of this step are to stand
        self._why: dict[int, str] = {}
        self._look_seconds = 2e-5  # to look at one sequence
        self._last_rows = 0

    # Before the step

    def asks(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        self._expected.clear()
        self._why.clear()
        found = [seq for seq in seqs if self._writes(seq) and self._is_due(seq)]
        return [seq for seq in found if not self._free.isdisjoint(seq.request.drafters)], self.settings.most

    def _writes(self, seq: Sequence) -> bool:
        """Whether a draft can be of use. A prompt's last step drafts nothing: the first token waits for no draft."""
        return seq.pending == 1 and bool(seq.request.drafters) and self._cap(seq) > 0

    def _cap(self, seq: Sequence) -> int:
        wanted = seq.request.speculation.max_draft
        most = self.settings.most if wanted is None else min(self.settings.most, wanted)
        return max(0, min(most, seq.room - 1))  # the step adds a token of its own

    def _is_due(self, seq: Sequence) -> bool:
        patience = self._patience.get(seq.id)
        if patience is None:
            patience = self._patience[seq.id] = _Patience()
        patience.wait -= 1
        if patience.wait < 0:
            return True
        self._why[seq.id] = NOT_ASKED
        return False

    def budgets(self, seqs: list[Sequence], offers: Offers) -> list[Budget]:
        """Whom `asks` left alone is left alone here, too."""
        began = perf_counter()
        due = [seq for seq in seqs if seq.id not in self._why and self._writes(seq)]
        if not due:
            return [Budget()] * len(seqs)
        if self.settings.fixed is not None:
            writers = sum(seq.pending == 1 for seq in seqs)
            found = self._fixed(due, offers, self.settings.fixed(writers))
        elif self.costs.known:
            found = self._adapted(self._market(seqs), due, offers)
            for seq in due:
                self._lose_patience(seq, seq.id in found, len(seqs))
        else:  # the first step tells what steps cost
            found = {}
            self._why.update((seq.id, UNKNOWN) for seq in due)
        for seq in due:
            self._note_offers(seq, offers.get(seq.id, {}))
        for seq in due:
            if seq.id not in found and seq.request.params.structured_outputs is not None:
                found[seq.id] = Budget(self._cap(seq))  # room for what a grammar forces, which always stands
        self._look_seconds += 0.05 * ((perf_counter() - began) / len(due) - self._look_seconds)
        return [found.get(seq.id, Budget()) for seq in seqs]

    def _market(self, seqs: list[Sequence]) -> Market:
        writers = sum(seq.pending == 1 for seq in seqs)
        rows = sum(min(seq.pending, SMALL) for seq in seqs)
        curve = self.costs.curve(rows + writers * self.settings.most)
        held = self.costs.seconds(rows, sum(seq.cached for seq in seqs)) - float(curve[rows])
        return Market(writers, rows, curve, max(held, 0.0))

    def _adapted(self, market: Market, due: list[Sequence], offers: Offers) -> dict[int, Budget]:
        candidates = [self._candidates(market, seq, offers.get(seq.id, {})) for seq in due]
        plans = [best_plan(market, each, self.settings.margin) for each in candidates]
        drafting = self._drafting_seconds(market, plans)
        nodes = share_out(market, plans, drafting, self.settings.throughput, self.settings.margin)
        found: dict[int, Budget] = {}
        for seq, plan, count in zip(due, plans, nodes, strict=True):
            if count and count >= self.settings.shortest:
                count += self._stretch(seq, plan, count)
                found[seq.id] = Budget(count, plan.arm, self._floor(market, plan.arm))
                self._expected[seq.id] = plan.survival
        self._probe(market, due, found)
        skipped = Counter(
            LOW_ACCEPT if each else NO_GUESS for seq, each in zip(due, candidates, strict=True) if seq.id not in found
        )
        for seq, each in zip(due, candidates, strict=True):
            if seq.id not in found:
                self._why[seq.id] = LOW_ACCEPT if each else NO_GUESS
        self.decisions.note(len(found), skipped, lambda: self._reason(market, due))
        return found

    def _candidates(self, market: Market, seq: Sequence, offered: Mapping[str, Draft]) -> list[Candidate]:
        found, cap = [], self._cap(seq)
        for arm in seq.request.drafters:
            if arm not in self._free:
                found.append(self._unseen(market, seq, arm, cap))
            elif arm in offered:
                survival = self.acceptance.survival(self._ledger(seq), arm, offered[arm].cut(cap))
                found.append(Candidate(arm, survival))
        return found

    def _unseen(self, market: Market, seq: Sequence, arm: str, cap: int) -> Candidate:
        ledger, behind = self._ledger(seq), self._behind(seq, arm)
        untried = self.acceptance.tried(ledger, arm) < UNTRIED
        level, node, token = self.draft_costs[arm].prices(market.plain)
        # What must be read first is spread over the tokens it will serve; a draft for all is paid by all.
        reading = token * behind / max(1, min(seq.room, UNTRIED * 4 if untried else READ_AHEAD))
        each = level / market.writers + node
        depth = min(cap, UNTRIED) if untried else cap
        return Candidate(arm, self.acceptance.unseen(ledger, arm, depth), lambda nodes: reading + each * nodes)

    def _behind(self, seq: Sequence, arm: str) -> int:
        return len(seq.tokens) - self._read.get((seq.id, arm), 0) if self.arms[arm].reads else 0

    def _drafting_seconds(self, market: Market, plans: list[Plan]) -> float:
        total = 0.0
        for arm in {plan.arm for plan in plans if plan.nodes and plan.arm not in self._free}:
            nodes = [plan.nodes for plan in plans if plan.arm == arm]
            total += self.draft_costs[arm].seconds(max(nodes), sum(nodes), 0, market.plain)
        return total

    def _stretch(self, seq: Sequence, plan: Plan, nodes: int) -> int:
        """Now and then farther than it pays: what is never tried is never found out. Free guesses are, all the same."""
        if plan.arm in self._free:
            return 0
        self._drafts[plan.arm] += 1
        return min(0 if self._drafts[plan.arm] % STRETCH_EVERY else 1, self._cap(seq) - nodes)

    def _floor(self, market: Market, arm: str) -> float:
        """How likely a branch must be for one more node to pay; a drafter that doubts its own guess stops there."""
        if arm in self._free:
            return 0.0
        row = market.extra(market.writers) / market.writers
        return min(0.9, 0.7 * (self._node_seconds(market, arm) + row) * market.writers / market.plain)

    def _node_seconds(self, market: Market, arm: str) -> float:
        """What a sequence pays for one node, if all draft."""
        return self.draft_costs[arm].seconds(1, market.writers, 0, market.plain) / market.writers

    def _fixed(self, due: list[Sequence], offers: Offers, nodes: int) -> dict[int, Budget]:
        """Always so many; of several drafters the one most of whose guesses should stand."""
        found = {}
        for seq in due:
            count = min(nodes, self._cap(seq))
            arm = self._likeliest(seq, offers.get(seq.id, {}), count)
            if arm and count:
                found[seq.id] = Budget(count, arm)
            else:
                self._why[seq.id] = NO_GUESS
        return found

    def _likeliest(self, seq: Sequence, offered: Mapping[str, Draft], nodes: int) -> str:
        if len(seq.request.drafters) == 1:
            return seq.request.drafters[0]
        ledger, best, most = self._ledger(seq), "", 0.0
        for arm in seq.request.drafters:
            if arm not in self._free:
                worth = sum(self.acceptance.unseen(ledger, arm, nodes, hopeful=False))
            else:
                worth = sum(self.acceptance.survival(ledger, arm, offered.get(arm, Draft()).cut(nodes)))
            if worth > most:
                best, most = arm, worth
        return best

    def trim(self, plan: list[Share], drafts: list[Draft]) -> list[Draft]:
        """Leave out what is too short, unless it was drawn: to drop a draw for what it led to would be a bias."""
        least = self.settings.shortest
        return [Draft() if len(draft) < least and not any(draft.drawn or ()) else draft for draft in drafts]

    def _probe(self, market: Market, due: list[Sequence], found: dict[int, Budget]) -> None:
        """Try a drafter that is not used, rarely and for one sequence, so that its day is noticed when it comes."""
        used = {budget.drafter for budget in found.values()}
        for arm in sorted({arm for seq in due for arm in seq.request.drafters if arm not in self._free}):
            able = [seq for seq in due if arm in seq.request.drafters]
            seq = min(able, key=lambda each: self._behind(each, arm))
            nodes = min(max(Probes.NODES, self.settings.shortest), self._cap(seq))
            seconds = self.draft_costs[arm].seconds(nodes, nodes, self._behind(seq, arm), market.plain)
            if self.probes.is_due(arm, arm in used, seconds + market.extra(nodes), market.plain):
                found[seq.id] = Budget(nodes, arm)
                self._expected.pop(seq.id, None)

    # After the step

    def observe(self, outcomes: list[Outcome], times: StepTimes) -> None:
        rows = sum(outcome.share.take + len(outcome.draft) for outcome in outcomes)
        if self.costs.known or all(outcome.share.take == 1 for outcome in outcomes):  # a prompt tells little of one row
            often = self.costs.steps < KNOWN_WELL or rows != self._last_rows
            self.costs.steps += not often
            if often or self.costs.steps % 4 == 0:
                self.costs.observe(rows, sum(outcome.share.start for outcome in outcomes), times.running)
            self._last_rows = rows
        self._observe_drafting(outcomes, times.drafting)
        for outcome in outcomes:
            if outcome.verdict is not None and outcome.share.seq.request.drafters:
                self._observe_guess(outcome)

    def _observe_drafting(self, outcomes: list[Outcome], seconds: float) -> None:
        mine = [outcome for outcome in outcomes if outcome.share.budget.nodes and self._is_paid(outcome)]
        arms = {outcome.share.budget.drafter for outcome in mine}
        nodes = sum(len(outcome.draft) for outcome in mine)
        if len(arms) != 1 or not nodes or not self.costs.known:
            return
        (arm,) = arms
        behind = sum(self._read_now(outcome, arm) for outcome in mine)
        depth = max(len(outcome.draft) for outcome in mine)
        self.draft_costs[arm].observe(depth, nodes, behind, seconds, self.costs.seconds(1))

    def _is_paid(self, outcome: Outcome) -> bool:
        arm = outcome.share.budget.drafter
        return arm in self.arms and arm not in self._free

    def _read_now(self, outcome: Outcome, arm: str) -> int:
        """Tokens the drafter had to read for this step; from now on it knows them."""
        if not self.arms[arm].reads:
            return 0
        key = (outcome.share.seq.id, arm)
        before = self._read.get(key, 0)
        self._read[key] = outcome.share.length
        return outcome.share.length - before

    def _observe_guess(self, outcome: Outcome) -> None:
        share, arm = outcome.share, outcome.share.budget.drafter
        expected = self._expected.pop(share.seq.id, None)
        ledger = self.acceptance.known(share.seq.id)
        if ledger is None:
            return
        if share.budget.nodes and outcome.draft.source in (arm, ""):
            if self._is_paid(outcome):
                self._note_paid(ledger, arm, outcome)
            elif expected is not None:
                self.acceptance.honesty(ledger, arm).count(sum(expected[: len(outcome.draft)]), outcome.accepted)
        self.acceptance.learn(ledger, share.seq.tokens)

    def _note_paid(self, ledger: Ledger, arm: str, outcome: Outcome) -> None:
        if not len(outcome.draft):  # paid for, and nothing came of it
            self.acceptance.rates(ledger, arm).count(cell(None, 1), False)
            return
        self.acceptance.note(ledger, arm, outcome.draft, outcome.share.length)
        if outcome.accepted:
            self.probes.succeeded(arm)

    def _note_offers(self, seq: Sequence, offered: Mapping[str, Draft]) -> None:
        """Free guesses are found out by the text whether they are used or not."""
        for arm, draft in offered.items():
            self.acceptance.note(self._ledger(seq), arm, draft, len(seq.tokens))

    def _lose_patience(self, seq: Sequence, drafted: bool, batch: int) -> None:
        """A sequence that is looked at in vain is looked at less often, so that being off costs nothing."""
        patience = self._patience[seq.id]
        patience.vain = 0 if drafted else patience.vain + 1
        if patience.vain > PATIENCE:
            dear = self._look_seconds * batch / (ASK_SHARE * max(self.costs.seconds(1), 1e-6))
            patience.wait = min(LONGEST_WAIT, max(int(dear), patience.vain // PATIENCE))

    def _ledger(self, seq: Sequence) -> Ledger:
        return self.acceptance.known(seq.id) or self.acceptance.ledger(seq.id, kind_of(seq))

    def _reason(self, market: Market, due: list[Sequence]) -> str:
        said, pays = [], False
        for arm in sorted({arm for seq in due for arm in seq.request.drafters}):
            node = 0.0 if arm in self._free else self._node_seconds(market, arm)
            need, have = break_even(market, node), self.acceptance.first_rate(arm)
            pays = pays or have >= need
            said.append(f"{arm} acceptance {have:.2f} {'>=' if have >= need else '<'} break-even {need:.2f}")
        told = f"{', '.join(said)} at batch {market.writers}"
        samples = any(seq.request.params.temperature > 0 for seq in due)
        return told if pays else f"{told}; {advice(market.writers, samples)}"

    def why(self, seq: Sequence) -> str:
        return self._why.get(seq.id, "")

    def plain_seconds(self, batch: int, context: int) -> float | None:
        return self.costs.seconds(batch, context) if self.costs.known else None

    def forget(self, seq: Sequence) -> None:
        self.acceptance.forget(seq.id)
        for kept in (self._patience, self._expected, self._why):
            kept.pop(seq.id, None)
        for arm in self.arms:
            self._read.pop((seq.id, arm), None)


def kind_of(seq: Sequence) -> str:
    """Requests of one kind share what was learnt: how freely they sample, and whether a grammar binds them."""
    params = seq.request.params
    heat = "greedy" if params.temperature == 0 else "cool" if params.temperature <= 0.8 else "warm"
    return f"{heat}, grammar" if params.structured_outputs is not None else heat
