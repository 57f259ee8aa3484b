"""Acceptance tracker: follows open drafts against the output tokens and feeds the acceptance model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foretell.types import Budget, Draft, Sequence, StepResult

from .acceptance_model import AcceptanceModel, AcceptanceRates, RequestAcceptance, cell, request_class_of


@dataclass(slots=True)
class OpenDraft:
    """A draft that output tokens have neither confirmed to its end nor contradicted yet.

    Every token of a free draft is counted, with its confidence. A timed drafter has a `budget`: of its chains the first
    choices are counted, of its trees whether each level contains the output token.
    """

    drafter: str
    draft: Draft
    position: int  # index of the token that decides next
    node: int = -1  # last node that was confirmed
    depth: int = 1
    budget: Budget | None = None
    on_first_choices: bool = True  # all nodes confirmed so far are the first choices of their levels
    free_confidence: float | None = None  # acceptance probability of the best free draft in the same step

    def follow(self, tokens: list[int], rates: AcceptanceRates) -> bool:
        """Count the draft tokens that `tokens` decide. Return whether the draft is resolved."""
        if self.budget is not None:
            return self._follow_budget(tokens, rates, self.budget)
        draft = self.draft
        drafted, parents, confidence = draft.tokens, draft.parents, draft.confidence
        node, depth, position, nodes = self.node, self.depth, self.position, len(parents)
        for token in tokens[position:] if position < len(tokens) else ():
            hit, depth_cell = -1, cell(None, depth)
            for child in range(node + 1, nodes):  # parents come before their children
                if parents[child] == node:
                    accepted = drafted[child] == token
                    rates.count(depth_cell, accepted, -1 if confidence is None else cell(confidence[child], depth))
                    hit = child if accepted else hit
            if hit < 0:
                return True
            node, depth = hit, depth + 1
        self.node, self.depth, self.position = node, depth, len(tokens)
        return False

    def _follow_budget(self, tokens: list[int], rates: AcceptanceRates, budget: Budget) -> bool:
        width, draft = budget.nodes / budget.depth, self.draft
        while self.position < len(tokens) and self.depth <= budget.depth:
            children, token = draft.children(self.node), tokens[self.position]
            hit = next((child for child in children if draft.tokens[child] == token), -1)
            if self.on_first_choices and children:
                confidence_cell = -1 if self.free_confidence is None else cell(self.free_confidence, self.depth)
                rates.count(cell(None, self.depth), hit == children[0], confidence_cell)
            if width > 1:  # a branch that ends before its depth counts as a miss, too
                rates.count_level(self.depth, width, hit >= 0)
            if hit < 0:
                return True
            self.on_first_choices &= hit == children[0]
            self.node, self.depth, self.position = hit, self.depth + 1, self.position + 1
        return self.depth > budget.depth


class AcceptanceTracker:
    """Keeps the open drafts of every sequence and the expectations of the current step."""

    def __init__(
        self,
        acceptance: AcceptanceModel,
        is_timed: Callable[[str], bool],
        on_accepted: Callable[[str], None] = lambda drafter: None,
    ) -> None:
        """`on_accepted` is called with a timed drafter whose draft had at least one token accepted."""
        self.acceptance, self.is_timed, self.on_accepted = acceptance, is_timed, on_accepted
        self._open: dict[int, list[OpenDraft]] = {}  # by sequence
        self._expected: dict[int, tuple[float, ...]] = {}  # by sequence: acceptance probabilities of this step's draft
        self._free_confidence: dict[int, float] = {}  # by sequence: of the best free draft in this step

    def begin_step(self) -> None:
        """Clear the expectations of the last step."""
        self._expected.clear()
        self._free_confidence.clear()

    def request(self, seq: Sequence) -> RequestAcceptance:
        """Return the acceptance rates of a sequence, made on first use."""
        return self.acceptance.find(seq.id) or self.acceptance.request(seq.id, request_class_of(seq))

    def set_free_confidence(self, seq: Sequence, probability: float) -> None:
        """Set the acceptance probability of the best free draft of this step, 0 if there is none."""
        self._free_confidence[seq.id] = probability

    def free_confidence(self, seq: Sequence) -> float | None:
        """Return the value set in this step, or None for a sequence without free drafters."""
        return self._free_confidence.get(seq.id)

    def expected_accept_probs(self, seq: Sequence, drafter: str, depth: int, optimistic: bool = True) -> list[float]:
        """Return the acceptance probabilities of a chain that a timed drafter has not made yet."""
        confidence = self._free_confidence.get(seq.id)
        return self.acceptance.expected_accept_probs(self.request(seq), drafter, depth, optimistic, confidence)

    def expect(self, seq: Sequence, accept_probs: tuple[float, ...]) -> None:
        """Store the acceptance probabilities of the draft planned for this step; empty for a probe."""
        self._expected[seq.id] = accept_probs

    def add_draft(self, seq_id: int, draft: OpenDraft) -> None:
        """Start to follow a draft."""
        self._open.setdefault(seq_id, []).append(draft)

    def add_free_drafts(self, seq: Sequence, drafts: Mapping[str, Draft]) -> None:
        """Follow free drafts, whether the step uses them or not: the output tokens decide about both."""
        if drafts:
            self.request(seq)  # so that `observe` finds it
        for drafter, draft in drafts.items():
            self.add_draft(seq.id, OpenDraft(drafter, draft, len(seq.tokens)))

    def resolve(self, seq_id: int, request: RequestAcceptance, tokens: list[int]) -> None:
        """Count what `tokens` say about the open drafts of a sequence."""
        request.cached_rates.clear()
        drafts = self._open.get(seq_id)
        if drafts:
            rates = self.acceptance.rates
            self._open[seq_id] = [each for each in drafts if not each.follow(tokens, rates(request, each.drafter))]

    def catch_up(self, seq: Sequence) -> None:
        """Resolve open drafts with the tokens that were generated since the sequence was last polled."""
        request = self.acceptance.find(seq.id)
        if request is not None and self._open.get(seq.id):
            self.resolve(seq.id, request, seq.tokens)

    def best_drafter(self, seq: Sequence, drafters: list[str], free_drafts: Mapping[str, Draft], length: int) -> str:
        """Return the drafter with the most expected accepted tokens, or "" if none has a draft."""
        if len(seq.request.drafters) == 1:
            return drafters[0] if drafters else ""
        request, expected = self.request(seq), {"": 0.0}
        for drafter in drafters:
            if self.is_timed(drafter):
                expected[drafter] = sum(self.expected_accept_probs(seq, drafter, length, optimistic=False))
            elif drafter in free_drafts:
                draft = free_drafts[drafter].truncate(length)
                expected[drafter] = sum(self.acceptance.accept_probs(request, drafter, draft))
        return max(expected, key=expected.__getitem__)

    def observe(self, result: StepResult) -> None:
        """Learn from the verified draft of one sequence."""
        scheduled, drafter = result.scheduled, result.scheduled.budget.drafter
        seq = scheduled.seq
        expected = self._expected.pop(seq.id, None)
        request = self.acceptance.find(seq.id)
        if request is None:
            return
        if scheduled.budget.nodes and result.draft.source in (drafter, ""):
            if self.is_timed(drafter):
                self._observe_timed(request, drafter, result)
            elif expected is not None:
                total = sum(expected[: len(result.draft)])
                self.acceptance.calibration(request, drafter).count(total, result.num_accepted)
        self.resolve(seq.id, request, seq.tokens)

    def _observe_timed(self, request: RequestAcceptance, drafter: str, result: StepResult) -> None:
        if not len(result.draft):  # its time was spent and it drafted nothing: as bad as a rejected token
            self.acceptance.rates(request, drafter).count(cell(None, 1), False)
            return
        scheduled = result.scheduled
        draft = OpenDraft(
            drafter,
            result.draft,
            scheduled.length,
            budget=scheduled.budget,
            free_confidence=self._free_confidence.get(scheduled.seq.id),
        )
        self.add_draft(scheduled.seq.id, draft)
        if result.num_accepted:
            self.on_accepted(drafter)

    def forget(self, seq: Sequence) -> None:
        """Drop a finished sequence, after its last tokens have resolved its open drafts."""
        self.catch_up(seq)
        self.acceptance.forget(seq.id)
        self._open.pop(seq.id, None)
        self._expected.pop(seq.id, None)
        self._free_confidence.pop(seq.id, None)

    def __len__(self) -> int:
        return len(self._open) + len(self._expected)
