"""Guesses as far as it pays, by what steps cost here and what stood in this request; not at all where it does not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from foretell.types import Budget, Draft, Outcome, Sequence, Share, StepTimes

from .acceptance import Acceptance, Ledger
from .controller import Controller, Offers
from .costs import DraftCosts, StepCosts
from .spending import Candidate, Market, Plan, best_plan, break_even, share_out

LOG = logging.getLogger("foretell")

SMALL = 64  # rows of a step from which the pace of a machine may be learnt first; a prompt tells little of one row
PROBE_NODES = 2
PROBE_SHARE = 0.01  # of the time may go into finding out whether a drafter has become worth it
PROBE_EVERY = 32  # steps between two probes, at the least
STRETCH_EVERY = 24  # of so many drafts one goes a node farther
ASK_SHARE = 0.005  # of the time may go into looking at free guesses that are not taken
PATIENCE = 16  # guesses in vain before a sequence is asked less often
READ_AHEAD = 64  # tokens over which it must pay that a drafter has to read the text first


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


@dataclass
class _Patience:
    """How long a sequence's free guesses were not worth it."""

    vain: int = 0
    wait: int = 0


@dataclass
class Decisions:
    """What was decided, to be shown: steps by reason, and the last reason in words."""

    drafted: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    on: bool = True
    reason: str = ""


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
        self._patience: dict[int, _Patience] = {}
        self._read: dict[tuple[int, str], int] = {}  # tokens a drafter has read of a sequence
        self._unused: Counter[str] = Counter()  # steps since a drafter was last used
        self._drafts: Counter[str] = Counter()
        self._expected: dict[int, float] = {}  # guesses of this step that should stand, by sequence
        self._probing: dict[str, int] = {}  # steps between its probes
        self._ask_seconds = 2e-5  # for one sequence
        self._drafting = 1.0  # the share of late steps that drafted

    # Before the step

    def asks(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        return [seq for seq in seqs if self._writes(seq) and self._may_ask(seq)], self.settings.most

    def _writes(self, seq: Sequence) -> bool:
        """Whether a draft can be of use. A prompt's last step drafts nothing: the first token waits for no draft."""
        return seq.pending == 1 and bool(seq.request.drafters) and seq.room > 1 and self._cap(seq) > 0

    def _cap(self, seq: Sequence) -> int:
        wanted = seq.request.speculation.max_draft
        most = self.settings.most if wanted is None else min(self.settings.most, wanted)
        return max(0, min(most, seq.room - 1))  # the step adds a token of its own

    def _may_ask(self, seq: Sequence) -> bool:
        if not any(self.arms[arm].free for arm in seq.request.drafters):
            return False
        patience = self._patience.setdefault(seq.id, _Patience())
        patience.wait -= 1
        return patience.wait < 0

    def budgets(self, seqs: list[Sequence], offers: Offers) -> list[Budget]:
        writers = [seq for seq in seqs if self._writes(seq)]
        found: dict[int, Budget] = {}
        if writers and self.settings.fixed is not None:
            found = self._fixed(writers, offers, self.settings.fixed(len(writers)))
        elif writers and self.costs.known:
            found = self._adapted(self._market(seqs, writers), writers, offers)
        for seq in writers:
            self._note_patience(seq, offers, found)
        return [found.get(seq.id, Budget()) for seq in seqs]

    def _market(self, seqs: list[Sequence], writers: list[Sequence]) -> Market:
        rows = sum(min(seq.pending, SMALL) for seq in seqs)
        curve = self.costs.curve(rows + len(writers) * self.settings.most)
        held = self.costs.seconds(rows, sum(seq.cached for seq in seqs)) - self.costs.seconds(rows)
        return Market(len(writers), rows, curve, held)

    def _adapted(self, market: Market, writers: list[Sequence], offers: Offers) -> dict[int, Budget]:
        plans = [best_plan(market, self._candidates(market, seq, offers), self.settings.margin) for seq in writers]
        nodes = share_out(
            market,
            plans,
            self._drafting_seconds(market, writers, plans),
            self.settings.throughput,
            self.settings.margin,
        )
        found = {
            seq.id: Budget(count + self._stretch(seq, plan, count), plan.arm, self._floor(market, plan))
            for seq, plan, count in zip(writers, plans, nodes, strict=True)
            if count
        }
        self._expected = {
            seq.id: sum(plan.survival[:count]) for seq, plan, count in zip(writers, plans, nodes, strict=True) if count
        }
        self._probe(market, writers, found)
        self._note_decision(market, writers, found, offers)
        return found

    def _candidates(self, market: Market, seq: Sequence, offers: Offers) -> list[Candidate]:
        ledger = self._ledger(seq)
        cap, offered = self._cap(seq), offers.get(seq.id, {})
        found = []
        for arm in seq.request.drafters:
            if not self.arms[arm].free:
                found.append(self._unseen(market, seq, ledger, arm, cap))
            elif arm in offered:
                found.append(Candidate(arm, self.acceptance.survival(ledger, arm, offered[arm].cut(cap))))
        return found

    def _unseen(self, market: Market, seq: Sequence, ledger: Ledger, arm: str, cap: int) -> Candidate:
        costs, plain, writers = self.draft_costs[arm], market.plain, market.writers
        behind = self._behind(seq, arm)
        lasting = max(1, min(seq.room, READ_AHEAD))

        def seconds(nodes: int) -> float:
            """A sequence's part of a draft for all; what must be read first is spread over the tokens it will serve."""
            reading = costs.seconds(0, 0, behind, plain) / lasting
            return costs.seconds(nodes, nodes * writers, 0, plain) / writers + reading

        return Candidate(arm, self.acceptance.unseen(ledger, arm, cap), seconds)

    def _behind(self, seq: Sequence, arm: str) -> int:
        return len(seq.tokens) - self._read.get((seq.id, arm), 0) if self.arms[arm].reads else 0

    def _drafting_seconds(self, market: Market, writers: list[Sequence], plans: list[Plan]) -> float:
        total = 0.0
        for arm in {plan.arm for plan in plans if plan.nodes and not self.arms[plan.arm].free}:
            nodes = [plan.nodes for plan in plans if plan.arm == arm]
            total += self.draft_costs[arm].seconds(max(nodes), sum(nodes), 0, market.plain)
        return total

    def _stretch(self, seq: Sequence, plan: Plan, nodes: int) -> int:
        """Now and then farther than it pays: what is never tried is never found out. Free guesses are, all the same."""
        if self.arms[plan.arm].free:
            return 0
        self._drafts[plan.arm] += 1
        wanted = 0 if self._drafts[plan.arm] % STRETCH_EVERY else 1
        return min(wanted, self._cap(seq) - nodes)

    def _floor(self, market: Market, plan: Plan) -> float:
        """How likely a branch must be for one more node to pay; a drafter that doubts its own guess stops there."""
        if self.arms[plan.arm].free:
            return 0.0
        node = self.draft_costs[plan.arm].seconds(1, market.writers, 0, market.plain) / market.writers
        row = market.extra(market.writers) / market.writers
        return min(0.9, 0.7 * (node + row) * market.writers / market.plain)

    def _fixed(self, writers: list[Sequence], offers: Offers, nodes: int) -> dict[int, Budget]:
        """Always so many; of several drafters the one most of whose guesses should stand."""
        found = {}
        for seq in writers:
            count = min(nodes, self._cap(seq))
            arm = self._likeliest(seq, offers.get(seq.id, {}), count)
            if arm and count:
                found[seq.id] = Budget(count, arm)
        return found

    def _likeliest(self, seq: Sequence, offered: Mapping[str, Draft], nodes: int) -> str:
        if len(seq.request.drafters) == 1:
            return seq.request.drafters[0]
        ledger, best, most = self._ledger(seq), "", 0.0
        for arm in seq.request.drafters:
            if not self.arms[arm].free:
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

    def _probe(self, market: Market, writers: list[Sequence], found: dict[int, Budget]) -> None:
        """Try a drafter that is not used, rarely and for one sequence, so that its day is noticed when it comes."""
        used = {budget.drafter for budget in found.values()}
        for arm in {arm for seq in writers for arm in seq.request.drafters if not self.arms[arm].free}:
            self._unused[arm] = 0 if arm in used else self._unused[arm] + 1
            seconds = self.draft_costs[arm].seconds(PROBE_NODES, PROBE_NODES, 0, market.plain) + market.extra(
                PROBE_NODES
            )
            often = max(PROBE_EVERY, int(seconds / (PROBE_SHARE * market.plain)))
            if self._unused[arm] >= max(often, self._probing.get(arm, 0)):
                seq = min((s for s in writers if arm in s.request.drafters), key=lambda s: self._behind(s, arm))
                found[seq.id] = Budget(min(PROBE_NODES, self._cap(seq)), arm)
                self._unused[arm] = 0
                self._probing[arm] = min(2 * max(often, self._probing.get(arm, 0)), 1024)

    # After the step

    def observe(self, outcomes: list[Outcome], times: StepTimes) -> None:
        rows = sum(outcome.share.take + len(outcome.draft) for outcome in outcomes)
        if self.costs.known or rows <= SMALL:
            self.costs.observe(rows, sum(outcome.share.start for outcome in outcomes), times.running)
        self._observe_drafting(outcomes, times.drafting)
        for outcome in outcomes:
            if outcome.verdict is not None and outcome.share.seq.request.drafters:
                self._observe_guess(outcome)

    def _observe_drafting(self, outcomes: list[Outcome], seconds: float) -> None:
        shares = [outcome.share for outcome in outcomes if outcome.share.budget.nodes]
        arms = {share.budget.drafter for share in shares if not self._is_free(share.budget.drafter)}
        if len(arms) == 1 and self.costs.known:
            (arm,) = arms
            mine = [outcome for outcome in outcomes if outcome.share.budget.drafter == arm]
            depth, nodes = max(len(o.draft) for o in mine), sum(len(o.draft) for o in mine)
            behind = sum(self._behind_before(outcome, arm) for outcome in mine)
            self.draft_costs[arm].observe(depth, nodes, behind, seconds, self.costs.seconds(1))
            for outcome in mine:
                self._read[outcome.share.seq.id, arm] = outcome.share.length
        elif not arms and shares:
            self._ask_seconds += 0.05 * (min(seconds / len(shares), 1e-3) - self._ask_seconds)

    def _behind_before(self, outcome: Outcome, arm: str) -> int:
        if not self.arms[arm].reads:
            return 0
        return outcome.share.length - self._read.get((outcome.share.seq.id, arm), 0)

    def _is_free(self, arm: str) -> bool:
        return arm in self.arms and self.arms[arm].free

    def _observe_guess(self, outcome: Outcome) -> None:
        share, ledger = outcome.share, self._ledger(outcome.share.seq)
        arm = share.budget.drafter
        if share.budget.nodes and not self._is_free(arm) and outcome.draft.source == arm:
            self.acceptance.note(ledger, arm, outcome.draft, share.length)
            if outcome.accepted:
                self._probing.pop(arm, None)
        expected = self._expected.pop(share.seq.id, None)
        if expected is not None and len(outcome.draft) and self._is_free(arm):
            factor = self.acceptance.honesty(ledger, arm).factor
            self.acceptance.honesty(ledger, arm).count(expected / factor, outcome.accepted)
        self.acceptance.learn(ledger, share.seq.tokens)

    def _note_patience(self, seq: Sequence, offers: Offers, found: dict[int, Budget]) -> None:
        """A sequence whose free guesses are not worth it is asked less often, so that being off costs nothing."""
        offered = offers.get(seq.id)
        if offered is None:
            return
        for arm, draft in offered.items():
            if arm in seq.request.drafters:
                self.acceptance.note(self._ledger(seq), arm, draft, len(seq.tokens))
        patience = self._patience[seq.id]
        patience.vain = 0 if seq.id in found else patience.vain + 1
        if patience.vain > PATIENCE and self.costs.known:
            rarely = self._ask_seconds / (ASK_SHARE * max(self.costs.seconds(1), 1e-6))
            patience.wait = min(16, int(rarely * max(1, len(self._patience))))

    def _ledger(self, seq: Sequence) -> Ledger:
        return self.acceptance.ledger(seq.id, kind_of(seq))

    def _note_decision(self, market: Market, writers: list[Sequence], found: dict[int, Budget], offers: Offers) -> None:
        self.decisions.drafted += len(found)
        for seq in writers:
            if seq.id not in found:
                self.decisions.skipped["does not pay" if offers.get(seq.id) else "nothing to guess"] += 1
        self._drafting += 0.06 * (bool(found) - self._drafting)
        on = self._drafting > (0.05 if self.decisions.on else 0.2)
        if on != self.decisions.on:
            self.decisions.on, self.decisions.reason = on, self._reason(market, writers)
            LOG.info("drafting is %s: %s", "on" if on else "off", self.decisions.reason)

    def _reason(self, market: Market, writers: list[Sequence]) -> str:
        arms = sorted({arm for seq in writers for arm in seq.request.drafters})
        said = []
        for arm in arms:
            free = self.arms[arm].free
            node = 0.0 if free else self.draft_costs[arm].seconds(1, market.writers, 0, market.plain) / market.writers
            need, have = break_even(market, node), self.acceptance.first_rate(arm)
            said.append(f"{arm} acceptance {have:.2f} {'>=' if have >= need else '<'} break-even {need:.2f}")
        return f"{', '.join(said)} at batch {market.writers}"

    def plain_seconds(self, batch: int, context: int) -> float | None:
        return self.costs.seconds(batch, context) if self.costs.known else None

    def forget(self, seq: Sequence) -> None:
        self.acceptance.forget(seq.id)
        self._patience.pop(seq.id, None)
        for arm in self.arms:
            self._read.pop((seq.id, arm), None)


def kind_of(seq: Sequence) -> str:
    """Requests of one kind share what was learnt: how freely they sample, and whether a grammar binds them."""
    params = seq.request.params
    heat = "greedy" if params.temperature == 0 else "cool" if params.temperature <= 0.8 else "warm"
    return f"{heat}, grammar" if params.structured_outputs is not None else heat
