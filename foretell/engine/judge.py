"""What the target makes of each draft: rows of logits become verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.sampling import noise
from foretell.sampling.history import History, looks_back
from foretell.sampling.logprobs import token_logprobs
from foretell.sampling.sampling import Row, adjusted, choose, probabilities
from foretell.types import Draft, Request, Share, TokenLogprob, Verdict
from foretell.verify import batched
from foretell.verify.chance import Coins
from foretell.verify.match import walk
from foretell.verify.rules import Rule, find_rule
from foretell.verify.threshold import DEFAULTS, ThresholdSettings

BATCHED = {"rejection": batched.rejection, "block": batched.block}


@dataclass(frozen=True)
class Case:
    """One draft to be judged: logits [1 + nodes, vocab] after the root and after each node, and a grammar's masks."""

    share: Share
    draft: Draft
    logits: Tensor
    masks: Tensor | None = None

    @property
    def request(self) -> Request:
        return self.share.seq.request

    def rows(self) -> list[Row]:
        """What decides the token after the sequence's last one and after each node of its draft."""
        request, vocab = self.request, self.logits.shape[-1]
        history = History(request, self.share.seq.tokens, vocab, self.logits.device) if looks_back(request) else None
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.draft.tokens, self.draft.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        masks = [None] * len(paths) if self.masks is None else list(self.masks)
        return [
            Row(request.params, request.seed, self.share.length + len(path), history, path, mask)
            for path, mask in zip(paths, masks, strict=True)
        ]


@dataclass(frozen=True)
class Judgement:
    """A verdict, the target's own tokens where the rule drew them, and log-probabilities where they are wanted."""

    verdict: Verdict
    chosen: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


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

    def __call__(self, cases: list[Case]) -> list[Judgement]:
        verdicts: dict[int, tuple[Verdict, tuple[int, ...]]] = {}
        by_rule: dict[str, list[int]] = {}
        for i, case in enumerate(cases):
            by_rule.setdefault(case.request.rule, []).append(i)
        for rule, members in by_rule.items():
            some = [cases[i] for i in members]
            judged = self._match(some) if rule == "match" else self._by_distribution(rule, some)
            verdicts.update(zip(members, judged, strict=True))
        return [Judgement(*verdicts[i], _logprobs(case, verdicts[i][0])) for i, case in enumerate(cases)]

    def _match(self, cases: list[Case]) -> list[tuple[Verdict, tuple[int, ...]]]:
        rows = [case.rows() for case in cases]
        logits = cases[0].logits if len(cases) == 1 else torch.cat([case.logits for case in cases])
        tokens = iter(choose(logits, [row for each in rows for row in each]))
        chosen = [tuple(next(tokens) for _ in each) for each in rows]
        return [(walk(case.draft, own), own) for case, own in zip(cases, chosen, strict=True)]

    def _by_distribution(self, rule: str, cases: list[Case]) -> list[tuple[Verdict, tuple[int, ...]]]:
        rows = [row for case in cases for row in case.rows()]
        logits = adjusted(torch.cat([case.logits for case in cases]), rows)
        probs = probabilities(logits, [row.params for row in rows])
        if rule in BATCHED and self.rules is rule_of and all(case.draft.is_chain for case in cases):
            return [(verdict, ()) for verdict in _judge_chains(rule, cases, probs)]
        split = torch.split(probs, [len(case.draft) + 1 for case in cases])
        return [(self._judge_one(case, each), ()) for case, each in zip(cases, split, strict=True)]

    def _judge_one(self, case: Case, probs: Tensor) -> Verdict:
        return self.rules(case.request)(case.draft, probs, Coins(case.request.seed, case.share.length))


def _judge_chains(rule: str, cases: list[Case], probs: Tensor) -> list[Verdict]:
    """All chains at once; decides as the definition does."""
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
