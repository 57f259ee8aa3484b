"""Verification of the drafts of a step, each by the rule of its request. The rules are in `foretell/verify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.sampling import noise
from foretell.sampling.logits_processors import TokenHistory, changes_logits
from foretell.sampling.sampling import SamplingRow, argmax_tokens, probabilities, process_logits, sample
from foretell.types import (
    Draft,
    Request,
    ScheduledSequence,
    TokenDetail,
    TokenLogprob,
    VerifyResult,
)
from foretell.verify import batched
from foretell.verify.lossy import DEFAULTS, ThresholdSettings
from foretell.verify.match import verify_match
from foretell.verify.randomness import StepRandom
from foretell.verify.rules import LOSSY, Rule, find_rule

from .token_details import output_logprobs, token_details

BATCHED = {"rejection": batched.rejection, "block": batched.block}  # rules with an implementation for many chains


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
