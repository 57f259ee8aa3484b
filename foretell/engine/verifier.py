"""Verification: which draft tokens of a step are accepted, and which token follows them.

`Verifier.verify` takes a step whose forward pass is done and returns a `StepResult` for each sequence.
`RuleVerifier` applies the verification rule of each request to its logits; the rules are in `foretell/verify`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.runner.batch_layout import num_logits
from foretell.runner.executor import StepOutput
from foretell.sampling import noise
from foretell.sampling.grammar_matcher import GrammarError
from foretell.sampling.logits_processors import TokenHistory, changes_logits
from foretell.sampling.sampling import SamplingRow, argmax_tokens, probabilities, process_logits, sample, topk
from foretell.types import (
    Draft,
    Request,
    ScheduledSequence,
    Sequence,
    StepResult,
    TokenDetail,
    TokenLogprob,
    VerifyResult,
)
from foretell.verify import batched
from foretell.verify.lossy import DEFAULTS, ThresholdSettings
from foretell.verify.match import verify_match
from foretell.verify.randomness import StepRandom
from foretell.verify.rules import LOSSY, Rule, find_rule

from .async_scheduling import InFlightStep
from .draft_guard import SafeDrafter
from .sequence_state import SequenceState
from .token_details import output_logprobs, prompt_logprobs, token_details

Pair = tuple[ScheduledSequence, Draft]
TopTokens = tuple[tuple[int, ...], ...]  # for each row the top-k token ids
BATCHED = {"rejection": batched.rejection, "block": batched.block}  # rules with an implementation for many chains


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


@dataclass
class VerifyCase:
    """One draft to verify: its rows among the logits of a step, and the masks of a grammar."""

    scheduled: ScheduledSequence
    draft: Draft
    step_logits: Tensor  # [rows of the step, vocab]
    first_row: int
    masks: Tensor | None = None
    request: Request = field(init=False)
    history: TokenHistory | None = field(init=False)  # set if sampling depends on previous tokens
    is_greedy: bool = field(init=False)  # whether its tokens are the argmax of unprocessed logits

    def __post_init__(self) -> None:
        request, tokens = self.scheduled.seq.request, self.scheduled.seq.tokens
        has_history = changes_logits(request, len(tokens) - len(request.prompt))
        self.request = request
        self.is_greedy = not has_history and request.params.temperature == 0
        vocab, device = self.step_logits.shape[-1], self.step_logits.device
        self.history = TokenHistory(request, tokens, vocab, device) if has_history else None

    @cached_property
    def logits(self) -> Tensor:
        """[1 + nodes, vocab]: after the root and after each node. Sliced on demand, because few cases need it."""
        return self.step_logits[self.first_row : self.first_row + 1 + len(self.draft)]

    @property
    def error(self) -> str | None:
        """The failure of a logits processor of the caller's, if any."""
        return None if self.history is None else self.history.error

    def rows(self) -> list[SamplingRow]:
        """Return the sampling inputs of the token after the last one and after each node of the draft."""
        request, history, length = self.request, self.history, self.scheduled.length
        if history is None:  # then the draft tokens in between do not matter
            assert self.masks is None, "a grammar has a history"
            return [SamplingRow(request.params, request.seed, length + depth) for depth in (0, *self.draft.depths())]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.draft.tokens, self.draft.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        masks = [None] * len(paths) if self.masks is None else list(self.masks)
        return [
            SamplingRow(request.params, request.seed, length + len(path), history, path, mask)
            for path, mask in zip(paths, masks, strict=True)
        ]


class Verification(NamedTuple):
    """The outcome of one case: the result, and what the request wants to know about its tokens."""

    result: VerifyResult
    target_tokens: tuple[int, ...]  # the target's own token of each row, where the rule samples them
    logprobs: tuple[TokenLogprob, ...] | None
    details: tuple[TokenDetail, ...] | None = None


def rule_for(request: Request) -> Rule:
    """Return the verification rule of a request, with its thresholds."""
    settings = DEFAULTS
    if request.speculation.acceptance_threshold is not None:
        upper, lower = request.speculation.acceptance_threshold
        settings = ThresholdSettings(upper=upper, lower=lower)
    return find_rule(request.rule, settings)


class RuleVerifier:
    """Verifies the drafts of a step, each by the rule of its request."""

    def __init__(self, rules: Callable[[Request], Rule] = rule_for) -> None:
        """`rules` finds the rules that work on distributions, that is, all but `match`."""
        self.rules = rules

    def verify_cases(
        self, cases: list[VerifyCase], logits: Tensor, argmax: Callable[[], list[int]] | None = None
    ) -> list[Verification]:
        """Verify the cases of a step. `logits` has the rows of all of them; `argmax` returns the argmax of each row."""
        found: dict[int, Verification] = {}
        by_rule: dict[str, list[int]] = {}
        for i, case in enumerate(cases):
            by_rule.setdefault(case.request.rule, []).append(i)
        for rule, members in by_rule.items():
            group = cases if len(by_rule) == 1 else [cases[i] for i in members]
            rows = gather_logits(group, logits)
            if rule == "match":
                verified = self._match(group, rows, argmax if rows is logits else None)
            else:
                verified = self._by_distribution(rule, group, rows)
            for i, case, (result, target_tokens) in zip(members, group, verified, strict=True):
                found[i] = Verification(
                    result, target_tokens, output_logprobs(case, result), token_details(case, result)
                )
        return [found[i] for i in range(len(cases))]

    def _match(
        self, cases: list[VerifyCase], logits: Tensor, argmax: Callable[[], list[int]] | None
    ) -> list[tuple[VerifyResult, tuple[int, ...]]]:
        """Accept the draft tokens that equal the target's own samples with the request's noise."""
        if any(not case.is_greedy for case in cases):
            tokens = sample(logits, [row for case in cases for row in case.rows()])
        elif argmax is not None:
            tokens = argmax()
        else:
            tokens = argmax_tokens(logits)
        verified = []
        first = 0
        for case in cases:
            end = first + len(case.draft) + 1
            own = tuple(tokens[first:end])
            verified.append((verify_match(case.draft, own), own))
            first = end
        return verified

    def _by_distribution(
        self, rule: str, cases: list[VerifyCase], logits: Tensor
    ) -> list[tuple[VerifyResult, tuple[int, ...]]]:
        """Verify by a rule that compares the target's and the drafter's distributions."""
        rows = [row for case in cases for row in case.rows()]
        logits = process_logits(logits, rows)
        probs = probabilities(logits, [row.params for row in rows])
        sizes = [len(case.draft) + 1 for case in cases]
        parts = list(zip(cases, torch.split(probs, sizes), torch.split(logits, sizes), strict=True))
        results: dict[int, VerifyResult] = {}
        if rule in BATCHED and self.rules is rule_for:  # all chains together, each tree by itself
            chains = [i for i, case in enumerate(cases) if case.draft.is_chain]
            own = probs if len(chains) == len(cases) else torch.cat([probs[:0], *(parts[i][1] for i in chains)])
            results = dict(zip(chains, _verify_chains(rule, [cases[i] for i in chains], own), strict=True))
        for i, (case, case_probs, case_logits) in enumerate(parts):
            if i not in results:
                results[i] = self._verify_one(_without_forbidden(case, case_logits), case_probs)
        return [(results[i], ()) for i in range(len(cases))]

    def _verify_one(self, case: VerifyCase, probs: Tensor) -> VerifyResult:
        probs = probs[: len(case.draft) + 1]
        return self.rules(case.request)(case.draft, probs, StepRandom(case.request.seed, case.scheduled.length))


def _verify_chains(rule: str, cases: list[VerifyCase], probs: Tensor) -> list[VerifyResult]:
    """Verify all chains in one batch; same results as the rule's definition."""
    if not cases:
        return []
    chains = batched.ChainBatch.of([case.draft for case in cases], probs)
    seeds = torch.tensor([case.request.seed for case in cases], device=probs.device)
    roots = torch.tensor([case.scheduled.length for case in cases], device=probs.device)
    coins = noise.accept_uniforms(seeds, roots, chains.nodes)
    race = noise.residual_noise(seeds, roots, torch.arange(probs.shape[-1], device=probs.device))
    found = BATCHED[rule](chains, coins, race)
    pairs = zip(found.accepted.tolist(), found.next_tokens.tolist(), strict=True)
    return [VerifyResult(tuple(range(accepted)), token) for accepted, token in pairs]


def _without_forbidden(case: VerifyCase, logits: Tensor) -> VerifyCase:
    """Cut a draft at its first token of probability 0, which a lossy rule might accept."""
    if case.request.rule not in LOSSY:
        return case
    draft, allowed = case.draft, logits > float("-inf")
    is_allowed = [bool(allowed[parent + 1, token]) for token, parent in zip(draft.tokens, draft.parents, strict=True)]
    if draft.probs is not None:
        rows = draft.probs * allowed[[parent + 1 for parent in draft.parents]]
        draft = replace(draft, probs=rows / rows.sum(-1, keepdim=True).clamp_min(1e-30))
    return replace(case, draft=draft if all(is_allowed) else draft.truncate(is_allowed.index(False)))


def gather_logits(cases: list[VerifyCase], logits: Tensor) -> Tensor:
    """Return the rows of the cases, in order; the step's own logits without a copy if those are all of them."""
    count = 0
    for case in cases:
        count += len(case.draft) + 1
    if count == logits.shape[0]:
        return logits
    return cases[0].logits if len(cases) == 1 else torch.cat([case.logits for case in cases])


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
