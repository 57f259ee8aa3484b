"""Verification: which draft tokens of a step are accepted, and which token follows them.

`Verifier.verify` takes a step whose forward pass is done and returns a `StepResult` for each sequence.
`RuleVerifier` (`rule_verifier.py`) applies the verification rule of each request to its logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter

import torch
from torch import Tensor

from foretell.runner.batch_layout import num_logits
from foretell.runner.executor import StepOutput
from foretell.sampling.grammar_matcher import GrammarError
from foretell.sampling.sampling import topk
from foretell.types import (
    Draft,
    ScheduledSequence,
    Sequence,
    StepResult,
)
from foretell.verify.match import verify_match

from .async_scheduling import InFlightStep
from .draft_guard import SafeDrafter
from .rule_verifier import RuleVerifier, Verification, VerifyCase
from .sequence_state import SequenceState
from .token_details import prompt_logprobs

Pair = tuple[ScheduledSequence, Draft]
TopTokens = tuple[tuple[int, ...], ...]  # for each row the top-k token ids


class Verifier:
    """Verifies the drafts of one step and returns a StepResult for each running sequence."""

    def __init__(
        self,
        states: Mapping[int, SequenceState],
        drafter: SafeDrafter,
        learns_from: Callable[[Sequence], bool],
        vocab: int,
        rule_verifier: RuleVerifier,
    ) -> None:
        """`learns_from` is the controller's: whether drafters learn from a sequence in this step."""
        self.states = states
        self.drafter = drafter
        self.learns_from = learns_from
        self.vocab = vocab
        self.rule_verifier = rule_verifier

    def verify(self, step: InFlightStep) -> list[StepResult]:
        """Verify the drafts of a step and return a result for each sequence that is still current.

        There are three ways, the cheapest that is enough first: the tokens that the device has sampled, the argmax of
        each row, or the logits. A sequence that was aborted or preempted since the launch has no result.
        """
        if step.wait_tokens is not None:
            return self._verify_sampled(step, *step.wait_tokens())
        if any(draft.device_draft is not None for draft in step.drafts):
            step.set_device_drafts(self.drafter.fetch_device_drafts(step.drafts), perf_counter())
        argmax = step.output.argmax
        if argmax is None or not all(map(self._needs_only_argmax, step.scheduled)):
            return self._verify_logits(step)
        tokens = argmax()
        step.tokens_at = perf_counter()
        ends = list(itertools.accumulate(1 + len(draft) for draft in step.drafts))
        return self._accept_matching(step, tokens, self._top_tokens(step, ends))

    def is_current(self, scheduled: ScheduledSequence) -> bool:
        """Return whether a sequence is where it was when the step was launched: neither gone nor preempted since."""
        return scheduled.seq.id in self.states and scheduled.seq.num_computed_tokens == scheduled.start

    def wants_topk(self, scheduled: ScheduledSequence, draft: Draft) -> bool:
        """Return whether a drafter of this sequence learns from the top-k tokens of this step.

        Not if the draft was copied (n-gram, suffix): computing the top-k costs as much as drafting, and a drafter that
        copies will find the same match again.
        """
        drafter = self.drafter
        if draft.source in drafter.copying_drafters:
            return False
        if drafter.learning_drafters.isdisjoint(scheduled.seq.request.drafters):
            return False
        return self.is_current(scheduled) and self.learns_from(scheduled.seq)

    def _verify_sampled(self, step: InFlightStep, tokens: list[int], top_k: list[list[int]]) -> list[StepResult]:
        """Verify a step without drafts that another step was launched after: its sampled tokens are all that is left.

        `top_k` has a row for each sequence, or none if no drafter wants them.
        """
        step.tokens_at = perf_counter()
        top_tokens: list[TopTokens] = [()] * len(step.scheduled)
        if top_k:
            wanted = map(self.wants_topk, step.scheduled, step.drafts)
            top_tokens = [(tuple(row),) if wants else () for row, wants in zip(top_k, wanted, strict=True)]
        return self._accept_matching(step, tokens, top_tokens)

    def _accept_matching(
        self, step: InFlightStep, tokens: list[int], top_tokens: Iterable[TopTokens]
    ) -> list[StepResult]:
        """Accept the draft tokens that equal the target's own token of the row before; `tokens` has one per row."""
        pairs = list(zip(step.scheduled, step.drafts, strict=True))
        hidden_states = split_hidden_states(step.output, pairs)
        results = []
        end = 0
        for (scheduled, draft), states, top_k in zip(pairs, hidden_states, top_tokens, strict=True):
            first, end = end, end + 1 + len(draft)
            if self.is_current(scheduled):
                own = tuple(tokens[first:end])
                results.append(StepResult(scheduled, draft, verify_match(draft, own), own, (), None, states, top_k))
        return results

    def _verify_logits(self, step: InFlightStep) -> list[StepResult]:
        """Verify each sequence by the rule of its request, from the logits of its rows."""
        output, pairs = step.output, list(zip(step.scheduled, step.drafts, strict=True))
        cases: list[VerifyCase] = []
        ends: list[int] = []
        end = 0
        for scheduled, draft in pairs:
            first, end = end, end + num_logits(scheduled, draft)
            ends.append(end)
            if not self.is_current(scheduled):
                continue
            if scheduled.reaches_end:
                masks = self._grammar_masks(scheduled, draft)
                cases.append(VerifyCase(scheduled, draft, output.logits, end - 1 - len(draft), masks))
            if scheduled.wants_prompt_logprobs:
                logprobs = prompt_logprobs(scheduled, output.logits[first:end])
                self.states[scheduled.seq.id].prompt_logprobs |= logprobs
        verified = iter(self.rule_verifier.verify_cases(cases, output.logits, output.argmax))
        step.tokens_at = perf_counter()
        for case in cases:
            if case.error is not None:
                self.states[case.scheduled.seq.id].error = case.error
        top_tokens = self._top_tokens(step, ends)
        return [
            step_result(scheduled, draft, next(verified) if scheduled.reaches_end else None, states, top_k)
            for (scheduled, draft), states, top_k in zip(
                pairs, split_hidden_states(output, pairs), top_tokens, strict=True
            )
            if self.is_current(scheduled)
        ]

    def _needs_only_argmax(self, scheduled: ScheduledSequence) -> bool:
        """Return whether the argmax of each row decides a sequence's tokens: greedy, rule `match`, nothing more wanted.

        Also true of one that is no longer current: its rows are still in the step, as many as were launched.
        """
        request = scheduled.seq.request
        if request.params.temperature > 0 or request.rule != "match" or not scheduled.reaches_end:
            return False
        if scheduled.wants_prompt_logprobs:
            return False
        return not self.is_current(scheduled) or self.states[scheduled.seq.id].can_sample_on_device

    def _top_tokens(self, step: InFlightStep, ends: list[int]) -> Iterable[TopTokens]:
        """Return the top-k tokens of the rows whose drafters learn from them, and book the time as theirs."""
        began_at = perf_counter()
        pairs = list(zip(step.scheduled, step.drafts, strict=True))
        found = row_topk(pairs, step.output.logits, ends, self.drafter.top_k, self.wants_topk)
        step.topk_seconds += perf_counter() - began_at
        return found

    def _grammar_masks(self, scheduled: ScheduledSequence, draft: Draft) -> Tensor | None:
        state = self.states[scheduled.seq.id]
        if state.matcher is None:
            return None
        try:
            return state.matcher.masks(draft)
        except GrammarError as error:  # ends this sequence with an error, and no other
            state.error = str(error)
            return torch.zeros(len(draft) + 1, self.vocab, dtype=torch.bool)


def row_topk(
    pairs: list[Pair],
    logits: Tensor,
    ends: list[int],
    count: int,
    wants: Callable[[ScheduledSequence, Draft], bool],
) -> Iterable[TopTokens]:
    """Return the top `count` tokens of each row of the sequences that `wants` selects, and () for the others.

    The rows of sequence i end before row `ends[i]`.
    """
    if not count:
        return [()] * len(pairs)
    num_rows = [0] * len(pairs)  # how many of each sequence's last rows are needed
    for i, (scheduled, draft) in enumerate(pairs):
        if scheduled.reaches_end and wants(scheduled, draft):
            num_rows[i] = 1 + len(draft)
    total = sum(num_rows)
    if not total:
        return [()] * len(pairs)
    if total == logits.shape[0]:
        selected = logits  # slicing and concatenating would take as long as the top-k itself
    else:
        parts = [logits[end - rows : end] for rows, end in zip(num_rows, ends, strict=True) if rows]
        selected = parts[0] if len(parts) == 1 else torch.cat(parts)
    found = map(tuple, topk(selected, count))
    return [tuple(itertools.islice(found, rows)) for rows in num_rows]


def split_hidden_states(output: StepOutput, pairs: list[Pair]) -> Iterable[Tensor | None]:
    """Return the target's hidden states of each sequence's tokens, if the runner keeps any."""
    if output.hidden_states is None:
        return [None] * len(pairs)
    if len(pairs) == 1:
        return [output.hidden_states]
    return torch.split(output.hidden_states, [scheduled.num_new_tokens + len(draft) for scheduled, draft in pairs])


def step_result(
    scheduled: ScheduledSequence,
    draft: Draft,
    verified: Verification | None,
    hidden_states: Tensor | None,
    top_tokens: TopTokens,
) -> StepResult:
    """Return the result of one sequence; `verified` is None while its prompt is prefilled."""
    if verified is None:
        return StepResult(scheduled, draft, hidden_states=hidden_states)
    return StepResult(
        scheduled,
        draft,
        verified.result,
        verified.target_tokens,
        (),
        verified.logprobs,
        hidden_states,
        top_tokens,
        verified.details,
    )
