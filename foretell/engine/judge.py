"""What the target makes of each draft: rows of logits become verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.sampling import noise
from foretell.sampling.history import History, looks_back
from foretell.sampling.logprobs import token_logprobs
from foretell.sampling.sampling import Row, adjusted, choose, likeliest, probabilities
from foretell.types import Draft, Request, Share, TokenDetail, TokenLogprob, Verdict
from foretell.verify import batched
from foretell.verify.chance import Coins
from foretell.verify.match import walk
from foretell.verify.rules import LOSSY, Rule, find_rule
from foretell.verify.threshold import DEFAULTS, ThresholdSettings

from .details import details_of

BATCHED = {"rejection": batched.rejection, "block": batched.block}


@dataclass
class Case:
    """One draft to be judged: its rows among a step's logits, from `first` on, and a grammar's masks."""

    share: Share
    draft: Draft
    step: Tensor  # [rows, vocab]
    first: int
    masks: Tensor | None = None
    request: Request = field(init=False)
    history: History | None = field(init=False)  # where anything looks back
    is_greedy: bool = field(init=False)  # whether its tokens are the likeliest by the model's own scores

    def __post_init__(self) -> None:
        request, tokens = self.share.seq.request, self.share.seq.tokens
        back = looks_back(request, len(tokens) - len(request.prompt))
        self.request, self.is_greedy = request, not back and request.params.temperature == 0
        self.history = History(request, tokens, self.step.shape[-1], self.step.device) if back else None

    @cached_property
    def logits(self) -> Tensor:
        """[1 + nodes, vocab] after the root and after each node; few are asked for, so they are cut out here."""
        return self.step[self.first : self.first + 1 + len(self.draft)]

    @property
    def error(self) -> str | None:
        """What went wrong in a function of the caller's."""
        return None if self.history is None else self.history.error

    def rows(self) -> list[Row]:
        """What decides the token after the sequence's last one and after each node of its draft."""
        request, history, length = self.request, self.history, self.share.length
        if history is None:  # then it does not matter which guesses lie between
            assert self.masks is None, "a grammar looks back"
            return [Row(request.params, request.seed, length + depth) for depth in (0, *self.draft.depths())]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.draft.tokens, self.draft.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        masks = [None] * len(paths) if self.masks is None else list(self.masks)
        return [
            Row(request.params, request.seed, length + len(path), history, path, mask)
            for path, mask in zip(paths, masks, strict=True)
        ]


class Judgement(NamedTuple):
    """A verdict, the target's own tokens where the rule drew them, and what the request wants to know of its tokens."""

    verdict: Verdict
    chosen: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    details: tuple[TokenDetail, ...] | None = None


def rule_of(request: Request) -> Rule:
    """The rule a request asked for, with its settings."""
    settings = DEFAULTS
    if request.speculation.acceptance_threshold is not None:
        upper, lower = request.speculation.acceptance_threshold
        settings = ThresholdSettings(upper=upper, lower=lower)
    return find_rule(request.rule, settings)


class Judge:
    """Judges the drafts of a step, each by its request's rule. `rules` finds those that judge by distributions."""

    def __init__(self, rules: Callable[[Request], Rule] = rule_of) -> None:
        self.rules = rules

    def __call__(
        self, cases: list[Case], logits: Tensor, known: Callable[[], list[int]] | None = None
    ) -> list[Judgement]:
        """`logits` are those of a step, of which each case has its rows; `known` gives the likeliest of each."""
        found: dict[int, Judgement] = {}
        by_rule: dict[str, list[int]] = {}
        for i, case in enumerate(cases):
            by_rule.setdefault(case.request.rule, []).append(i)
        for rule, members in by_rule.items():
            some = cases if len(by_rule) == 1 else [cases[i] for i in members]
            rows = gather(some, logits)
            if rule == "match":
                judged = self._match(some, rows, known if rows is logits else None)
            else:
                judged = self._by_distribution(rule, some, rows)
            for i, case, (verdict, chosen) in zip(members, some, judged, strict=True):
                found[i] = Judgement(verdict, chosen, _logprobs(case, verdict), details_of(case, verdict))
        return [found[i] for i in range(len(cases))]

    def _match(
        self, cases: list[Case], logits: Tensor, known: Callable[[], list[int]] | None
    ) -> list[tuple[Verdict, tuple[int, ...]]]:
        rows: list[Row] = []
        for case in cases:
            if not case.is_greedy:  # most are, and what decides a row need not be looked up
                rows = [row for each in cases for row in each.rows()]
                break
        tokens = choose(logits, rows) if rows else likeliest(logits) if known is None else known()
        judged, first = [], 0
        for case in cases:
            behind = first + len(case.draft) + 1
            chosen = tuple(tokens[first:behind])
            judged.append((walk(case.draft, chosen), chosen))
            first = behind
        return judged

    def _by_distribution(self, rule: str, cases: list[Case], logits: Tensor) -> list[tuple[Verdict, tuple[int, ...]]]:
        rows = [row for case in cases for row in case.rows()]
        logits = adjusted(logits, rows)
        probs = probabilities(logits, [row.params for row in rows])
        sizes = [len(case.draft) + 1 for case in cases]
        parts = list(zip(cases, torch.split(probs, sizes), torch.split(logits, sizes), strict=True))
        verdicts: dict[int, Verdict] = {}
        if rule in BATCHED and self.rules is rule_of:  # all chains at once, each tree by itself
            chains = [i for i, case in enumerate(cases) if case.draft.is_chain]
            mine = probs if len(chains) == len(cases) else torch.cat([probs[:0], *(parts[i][1] for i in chains)])
            verdicts = dict(zip(chains, _judge_chains(rule, [cases[i] for i in chains], mine), strict=True))
        for i, (case, each, scores) in enumerate(parts):
            if i not in verdicts:
                verdicts[i] = self._judge_one(_lawful(case, scores), each)
        return [(verdicts[i], ()) for i in range(len(cases))]

    def _judge_one(self, case: Case, probs: Tensor) -> Verdict:
        probs = probs[: len(case.draft) + 1]
        return self.rules(case.request)(case.draft, probs, Coins(case.request.seed, case.share.length))


def gather(cases: list[Case], logits: Tensor) -> Tensor:
    """The rows of the cases, one after the other; those of a whole step lie so already."""
    count = 0
    for case in cases:
        count += len(case.draft) + 1
    if count == logits.shape[0]:
        return logits
    return cases[0].logits if len(cases) == 1 else torch.cat([case.logits for case in cases])


def _lawful(case: Case, scores: Tensor) -> Case:
    """Under a lossy rule: without guesses that are forbidden outright, which it might let in."""
    if case.request.rule not in LOSSY:
        return case
    draft, allowed = case.draft, scores > float("-inf")
    lawful = [bool(allowed[parent + 1, token]) for token, parent in zip(draft.tokens, draft.parents, strict=True)]
    if draft.probs is not None:
        rows = draft.probs * allowed[[parent + 1 for parent in draft.parents]]
        draft = replace(draft, probs=rows / rows.sum(-1, keepdim=True).clamp_min(1e-30))
    return replace(case, draft=draft if all(lawful) else draft.cut(lawful.index(False)))


def _judge_chains(rule: str, cases: list[Case], probs: Tensor) -> list[Verdict]:
    """All chains at once; decides as the definition does."""
    if not cases:
        return []
    chains = batched.Chains.of([case.draft for case in cases], probs)
    seeds = torch.tensor([case.request.seed for case in cases], device=probs.device)
    roots = torch.tensor([case.share.length for case in cases], device=probs.device)
    coins = noise.coins(seeds, roots, chains.nodes)
    race = noise.pick_noise(seeds, roots, torch.arange(probs.shape[-1], device=probs.device))
    found = BATCHED[rule](chains, coins, race)
    pairs = zip(found.accepted.tolist(), found.next_tokens.tolist(), strict=True)
    return [Verdict(tuple(range(accepted)), token) for accepted, token in pairs]


def prompt_logprobs(share: Share, logits: Tensor) -> dict[int, TokenLogprob]:
    """How likely the model found the prompt's tokens that these rows foretell, by place."""
    prompt, top = share.seq.request.prompt, share.seq.request.params.prompt_logprobs
    assert top is not None, "asked for"
    tokens = prompt[share.start + 1 : share.start + 1 + share.take]
    found = token_logprobs(logits[: len(tokens)], tokens, top)
    return {share.start + 1 + i: each for i, each in enumerate(found)}


def _logprobs(case: Case, verdict: Verdict) -> tuple[TokenLogprob, ...] | None:
    """Of the tokens the verdict lets in, each by the row that foretold it."""
    top = case.request.params.logprobs
    if top is None:
        return None
    tokens = [*(case.draft.tokens[node] for node in verdict.path), verdict.next_token]
    rows = [0, *(node + 1 for node in verdict.path)]
    return tuple(token_logprobs(case.logits[rows], tokens, top))
