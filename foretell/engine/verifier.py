"""What a step comes to for each of its texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretell.engine.async_step import InFlightStep
from foretell.engine.token_details import details_of
from foretell.runner.batch_layout import logit_rows
from foretell.runner.executor import StepOutput
from foretell.sampling import noise
from foretell.sampling.grammar_matcher import GrammarError
from foretell.sampling.logits_processors import History, looks_back
from foretell.sampling.logprobs import token_logprobs
from foretell.sampling.sampling import Row, adjusted, choose, likeliest, probabilities
from foretell.sampling.topk import top
from foretell.types import Draft, Request, ScheduledSequence, StepResult, TokenDetail, TokenLogprob, VerifyResult
from foretell.verify import batched
from foretell.verify.lossy import DEFAULTS, ThresholdSettings
from foretell.verify.match import verify_match
from foretell.verify.randomness import StepRandom
from foretell.verify.rules import LOSSY, Rule, find_rule

if TYPE_CHECKING:
    from .engine import Engine

Pair = tuple[ScheduledSequence, Draft]
Top = tuple[tuple[int, ...], ...]


def row_topk(
    pairs: list[Pair],
    logits: torch.Tensor,
    ends: list[int],
    count: int,
    wants: Callable[[ScheduledSequence, Draft], bool],
) -> Iterable[Top]:
    """The `count` row_topk tokens of each row, for the shares that want them; others pay nothing. A share's rows end
    at its place in `ends`."""
    if not count:
        return [()] * len(pairs)
    mine = [0] * len(pairs)  # how many of each share's rows are looked at, the last ones
    for i, (share, draft) in enumerate(pairs):
        if share.reaches_end and wants(share, draft):
            mine[i] = 1 + len(draft)
    total = sum(mine)
    if not total:
        return [()] * len(pairs)
    if total == logits.shape[0]:
        together = logits  # to cut a part out takes torch as long as to look at it
    else:
        parts = [logits[end - rows : end] for rows, end in zip(mine, ends, strict=True) if rows]
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
    found = map(tuple, top(together, count))
    return [tuple(itertools.islice(found, rows)) for rows in mine]


def split_features(output: StepOutput, pairs: list[Pair]) -> Iterable[torch.Tensor | None]:
    """The target's states of each share's tokens, where they are tapped."""
    if output.hidden_states is None:
        return [None] * len(pairs)
    if len(pairs) == 1:
        return [output.hidden_states]
    return torch.split(output.hidden_states, [share.num_new_tokens + len(draft) for share, draft in pairs])


def outcome_of(
    share: ScheduledSequence, draft: Draft, judged: Verification | None, features: torch.Tensor | None, top: Top
) -> StepResult:
    """What a step taught about one sequence; nothing was judged where the prompt goes on."""
    if judged is None:
        return StepResult(share, draft, hidden_states=features)
    return StepResult(share, draft, judged.verdict, judged.chosen, (), judged.logprobs, features, top, judged.details)


BATCHED = {"rejection": batched.rejection, "block": batched.block}


@dataclass
class VerifyCase:
    """One draft to be judged: its rows among a step's logits, from `first` on, and a grammar's masks."""

    share: ScheduledSequence
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


class Verification(NamedTuple):
    """A verdict, the target's own tokens where the rule drew them, and what the request wants to know of its tokens."""

    verdict: VerifyResult
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


class SequenceVerifier:
    """Judges the drafts of a step, each by its request's rule. `rules` finds those that judge by distributions."""

    def __init__(self, rules: Callable[[Request], Rule] = rule_of) -> None:
        self.rules = rules

    def __call__(
        self, cases: list[VerifyCase], logits: Tensor, known: Callable[[], list[int]] | None = None
    ) -> list[Verification]:
        """`logits` are those of a step, of which each case has its rows; `known` gives the likeliest of each."""
        found: dict[int, Verification] = {}
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
                found[i] = Verification(verdict, chosen, _logprobs(case, verdict), details_of(case, verdict))
        return [found[i] for i in range(len(cases))]

    def _match(
        self, cases: list[VerifyCase], logits: Tensor, known: Callable[[], list[int]] | None
    ) -> list[tuple[VerifyResult, tuple[int, ...]]]:
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
            judged.append((verify_match(case.draft, chosen), chosen))
            first = behind
        return judged

    def _by_distribution(
        self, rule: str, cases: list[VerifyCase], logits: Tensor
    ) -> list[tuple[VerifyResult, tuple[int, ...]]]:
        rows = [row for case in cases for row in case.rows()]
        logits = adjusted(logits, rows)
        probs = probabilities(logits, [row.params for row in rows])
        sizes = [len(case.draft) + 1 for case in cases]
        parts = list(zip(cases, torch.split(probs, sizes), torch.split(logits, sizes), strict=True))
        verdicts: dict[int, VerifyResult] = {}
        if rule in BATCHED and self.rules is rule_of:  # all chains at once, each tree by itself
            chains = [i for i, case in enumerate(cases) if case.draft.is_chain]
            mine = probs if len(chains) == len(cases) else torch.cat([probs[:0], *(parts[i][1] for i in chains)])
            verdicts = dict(zip(chains, _judge_chains(rule, [cases[i] for i in chains], mine), strict=True))
        for i, (case, each, scores) in enumerate(parts):
            if i not in verdicts:
                verdicts[i] = self._judge_one(_lawful(case, scores), each)
        return [(verdicts[i], ()) for i in range(len(cases))]

    def _judge_one(self, case: VerifyCase, probs: Tensor) -> VerifyResult:
        probs = probs[: len(case.draft) + 1]
        return self.rules(case.request)(case.draft, probs, StepRandom(case.request.seed, case.share.length))


def gather(cases: list[VerifyCase], logits: Tensor) -> Tensor:
    """The rows of the cases, one after the other; those of a whole step lie so already."""
    count = 0
    for case in cases:
        count += len(case.draft) + 1
    if count == logits.shape[0]:
        return logits
    return cases[0].logits if len(cases) == 1 else torch.cat([case.logits for case in cases])


def _lawful(case: VerifyCase, scores: Tensor) -> VerifyCase:
    """Under a lossy rule: without guesses that are forbidden outright, which it might let in."""
    if case.request.rule not in LOSSY:
        return case
    draft, allowed = case.draft, scores > float("-inf")
    lawful = [bool(allowed[parent + 1, token]) for token, parent in zip(draft.tokens, draft.parents, strict=True)]
    if draft.probs is not None:
        rows = draft.probs * allowed[[parent + 1 for parent in draft.parents]]
        draft = replace(draft, probs=rows / rows.sum(-1, keepdim=True).clamp_min(1e-30))
    return replace(case, draft=draft if all(lawful) else draft.truncate(lawful.index(False)))


def _judge_chains(rule: str, cases: list[VerifyCase], probs: Tensor) -> list[VerifyResult]:
    """All chains at once; decides as the definition does."""
    if not cases:
        return []
    chains = batched.ChainBatch.of([case.draft for case in cases], probs)
    seeds = torch.tensor([case.request.seed for case in cases], device=probs.device)
    roots = torch.tensor([case.share.length for case in cases], device=probs.device)
    coins = noise.coins(seeds, roots, chains.nodes)
    race = noise.pick_noise(seeds, roots, torch.arange(probs.shape[-1], device=probs.device))
    found = BATCHED[rule](chains, coins, race)
    pairs = zip(found.accepted.tolist(), found.next_tokens.tolist(), strict=True)
    return [VerifyResult(tuple(range(accepted)), token) for accepted, token in pairs]


def prompt_logprobs(share: ScheduledSequence, logits: Tensor) -> dict[int, TokenLogprob]:
    """How likely the model found the prompt's tokens that these rows foretell, by place."""
    prompt, top = share.seq.request.prompt, share.seq.request.params.prompt_logprobs
    assert top is not None, "asked for"
    tokens = prompt[share.start + 1 : share.start + 1 + share.num_new_tokens]
    found = token_logprobs(logits[: len(tokens)], tokens, top)
    return {share.start + 1 + i: each for i, each in enumerate(found)}


def _logprobs(case: VerifyCase, verdict: VerifyResult) -> tuple[TokenLogprob, ...] | None:
    """Of the tokens the verdict lets in, each by the row that foretold it."""
    top = case.request.params.logprobs
    if top is None:
        return None
    tokens = [*(case.draft.tokens[node] for node in verdict.accepted_path), verdict.next_token]
    rows = [0, *(node + 1 for node in verdict.accepted_path)]
    return tuple(token_logprobs(case.logits[rows], tokens, top))


class Verifier:
    """Hears the texts of a step that still live, each by its rule; what only drafters want to know comes last."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, flight: InFlightStep) -> tuple[list[StepResult], float]:
        """What the target makes of each draft, and the seconds in this of what only drafters want to know."""
        if flight.landed is not None:
            tokens, best = flight.landed()
            flight.arrived = perf_counter()
            return self._land(flight, tokens, best), 0.0
        if any(draft.device_draft is not None for draft in flight.drafts):
            flight.see(self.engine.safe_drafter.fetch_device_drafts(flight.drafts), perf_counter())
        output = flight.output
        if output.argmax is None or not all(map(self._is_greedy, flight.plan)):
            return self._judge(flight)
        tokens = output.argmax()
        flight.arrived = perf_counter()
        ends = list(itertools.accumulate(1 + len(draft) for draft in flight.drafts))
        top, curious = self._top(flight, ends)
        return self._walked(flight, tokens, top), curious

    def _land(self, flight: InFlightStep, tokens: list[int], best: list[list[int]]) -> list[StepResult]:
        """A step without guesses that another was sent behind: its tokens are all there is of it."""
        top: list[Top] = [()] * len(flight.plan)
        if best:
            wanted = map(self.wants_top, flight.plan, flight.drafts)
            top = [(tuple(row),) if wants else () for row, wants in zip(best, wanted, strict=True)]
        return self._walked(flight, tokens, top)

    def _walked(self, flight: InFlightStep, tokens: list[int], top: Iterable[Top]) -> list[StepResult]:
        """Where the target's own token of each row says what stands, and nothing else is wanted of it."""
        pairs = list(zip(flight.plan, flight.drafts, strict=True))
        outcomes, end = [], 0
        for (share, draft), states, best in zip(pairs, split_features(flight.output, pairs), top, strict=True):
            first, end = end, end + 1 + len(draft)
            if self.engine.lives(share):
                chosen = tuple(tokens[first:end])
                outcomes.append(StepResult(share, draft, verify_match(draft, chosen), chosen, (), None, states, best))
        return outcomes

    def _judge(self, flight: InFlightStep) -> tuple[list[StepResult], float]:
        """Row by row of logits."""
        engine, output, pairs = self.engine, flight.output, list(zip(flight.plan, flight.drafts, strict=True))
        cases: list[VerifyCase] = []
        ends: list[int] = []
        end = 0
        for share, draft in pairs:
            first, end = end, end + logit_rows(share, draft)
            ends.append(end)
            if not engine.lives(share):
                continue
            if share.reaches_end:
                cases.append(VerifyCase(share, draft, output.logits, end - 1 - len(draft), self._masks(share, draft)))
            if share.wants_prompt_logprobs:
                found = prompt_logprobs(share, output.logits[first:end])
                engine.states[share.seq.id].prompt_logprobs |= found
        judged = iter(engine.sequence_verifier(cases, output.logits, output.argmax))
        flight.arrived = perf_counter()
        for case in cases:
            if case.error is not None:
                engine.states[case.share.seq.id].error = case.error
        top, curious = self._top(flight, ends)
        return [
            outcome_of(share, draft, next(judged) if share.reaches_end else None, states, each)
            for (share, draft), states, each in zip(pairs, split_features(output, pairs), top, strict=True)
            if engine.lives(share)
        ], curious

    def _is_greedy(self, share: ScheduledSequence) -> bool:
        """Whether a text's tokens are the row_topk of their rows, and guesses are held against those. Also of one that
        has gone meanwhile: its rows are still there, as many as were asked for."""
        request = share.seq.request
        if request.params.temperature > 0 or request.rule != "match" or not share.reaches_end:
            return False
        if share.wants_prompt_logprobs:
            return False
        return not self.engine.lives(share) or self.engine.states[share.seq.id].stands_alone

    def _top(self, flight: InFlightStep, ends: list[int]) -> tuple[Iterable[Top], float]:
        """The row_topk tokens of rows whose drafters learn from them, and the seconds that took."""
        began, pairs = perf_counter(), list(zip(flight.plan, flight.drafts, strict=True))
        found = row_topk(pairs, flight.output.logits, ends, self.engine.drafter.top_k, self.wants_top)
        return found, perf_counter() - began

    def wants_top(self, share: ScheduledSequence, draft: Draft) -> bool:
        """Whether a drafter of this text's learns from the row_topk tokens in this step. Not where the text is copied:
        to find them costs as much as to guess, and who copies finds the place again."""
        seq, guard = share.seq, self.engine.safe_drafter
        if draft.source in guard.copying_drafters or guard.learning_drafters.isdisjoint(seq.request.drafters):
            return False
        return self.engine.lives(share) and self.engine.controller.learns_from(seq)

    def _masks(self, share: ScheduledSequence, draft: Draft) -> torch.Tensor | None:
        track = self.engine.states[share.seq.id]
        if track.matcher is None:
            return None
        try:
            return track.matcher.masks(draft)
        except GrammarError as error:  # ends this text with its reason, and no other
            track.error = str(error)
            vocab = self.engine.runner.model.config.vocab
            return torch.zeros(len(draft) + 1, vocab, dtype=torch.bool)
