"""What a step comes to for each of its texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from foretell.runner.pack import logit_rows
from foretell.sampling.grammar_matcher import GrammarError
from foretell.types import Draft, Outcome, Share
from foretell.verify.match import walk

from .flight import Flight
from .judge import Case, prompt_logprobs
from .rows import Top, likeliest, outcome_of, split_features

if TYPE_CHECKING:
    from .engine import Engine


class Court:
    """Hears the texts of a step that still live, each by its rule; what only drafters want to know comes last."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, flight: Flight) -> tuple[list[Outcome], float]:
        """What the target makes of each draft, and the seconds in this of what only drafters want to know."""
        if flight.landed is not None:
            tokens, best = flight.landed()
            flight.arrived = perf_counter()
            return self._land(flight, tokens, best), 0.0
        if any(draft.unseen is not None for draft in flight.drafts):
            flight.see(self.engine.guard.seen(flight.drafts), perf_counter())
        output = flight.output
        if output.likeliest is None or not all(map(self._is_greedy, flight.plan)):
            return self._judge(flight)
        tokens = output.likeliest()
        flight.arrived = perf_counter()
        ends = list(itertools.accumulate(1 + len(draft) for draft in flight.drafts))
        top, curious = self._top(flight, ends)
        return self._walked(flight, tokens, top), curious

    def _land(self, flight: Flight, tokens: list[int], best: list[list[int]]) -> list[Outcome]:
        """A step without guesses that another was sent behind: its tokens are all there is of it."""
        top: list[Top] = [()] * len(flight.plan)
        if best:
            wanted = map(self.wants_top, flight.plan, flight.drafts)
            top = [(tuple(row),) if wants else () for row, wants in zip(best, wanted, strict=True)]
        return self._walked(flight, tokens, top)

    def _walked(self, flight: Flight, tokens: list[int], top: Iterable[Top]) -> list[Outcome]:
        """Where the target's own token of each row says what stands, and nothing else is wanted of it."""
        pairs = list(zip(flight.plan, flight.drafts, strict=True))
        outcomes, end = [], 0
        for (share, draft), states, best in zip(pairs, split_features(flight.output, pairs), top, strict=True):
            first, end = end, end + 1 + len(draft)
            if self.engine.lives(share):
                chosen = tuple(tokens[first:end])
                outcomes.append(Outcome(share, draft, walk(draft, chosen), chosen, (), None, states, best))
        return outcomes

    def _judge(self, flight: Flight) -> tuple[list[Outcome], float]:
        """Row by row of logits."""
        engine, output, pairs = self.engine, flight.output, list(zip(flight.plan, flight.drafts, strict=True))
        cases: list[Case] = []
        ends: list[int] = []
        end = 0
        for share, draft in pairs:
            first, end = end, end + logit_rows(share, draft)
            ends.append(end)
            if not engine.lives(share):
                continue
            if share.reaches_end:
                cases.append(Case(share, draft, output.logits, end - 1 - len(draft), self._masks(share, draft)))
            if share.reads_prompt_logprobs:
                found = prompt_logprobs(share, output.logits[first:end])
                engine.tracks[share.seq.id].prompt_logprobs |= found
        judged = iter(engine.judge(cases, output.logits, output.likeliest))
        flight.arrived = perf_counter()
        for case in cases:
            if case.error is not None:
                engine.tracks[case.share.seq.id].error = case.error
        top, curious = self._top(flight, ends)
        return [
            outcome_of(share, draft, next(judged) if share.reaches_end else None, states, each)
            for (share, draft), states, each in zip(pairs, split_features(output, pairs), top, strict=True)
            if engine.lives(share)
        ], curious

    def _is_greedy(self, share: Share) -> bool:
        """Whether a text's tokens are the likeliest of their rows, and guesses are held against those. Also of one that
        has gone meanwhile: its rows are still there, as many as were asked for."""
        request = share.seq.request
        if request.params.temperature > 0 or request.rule != "match" or not share.reaches_end:
            return False
        if share.reads_prompt_logprobs:
            return False
        return not self.engine.lives(share) or self.engine.tracks[share.seq.id].stands_alone

    def _top(self, flight: Flight, ends: list[int]) -> tuple[Iterable[Top], float]:
        """The likeliest tokens of rows whose drafters learn from them, and the seconds that took."""
        began, pairs = perf_counter(), list(zip(flight.plan, flight.drafts, strict=True))
        found = likeliest(pairs, flight.output.logits, ends, self.engine.drafter.wants_top, self.wants_top)
        return found, perf_counter() - began

    def wants_top(self, share: Share, draft: Draft) -> bool:
        """Whether a drafter of this text's learns from the likeliest tokens in this step. Not where the text is copied:
        to find them costs as much as to guess, and who copies finds the place again."""
        seq, guard = share.seq, self.engine.guard
        if draft.source in guard.copiers or guard.top_arms.isdisjoint(seq.request.drafters):
            return False
        return self.engine.lives(share) and self.engine.controller.watches(seq)

    def _masks(self, share: Share, draft: Draft) -> torch.Tensor | None:
        track = self.engine.tracks[share.seq.id]
        if track.matcher is None:
            return None
        try:
            return track.matcher.masks(draft)
        except GrammarError as error:  # ends this text with its reason, and no other
            track.error = str(error)
            vocab = self.engine.runner.model.config.vocab
            return torch.zeros(len(draft) + 1, vocab, dtype=torch.bool)
