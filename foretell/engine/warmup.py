"""What the first requests will need of a CUDA device, done before they come: to record a graph, or to make a library's
handles, takes longer than a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from foretell.draft.base import Drafter
from foretell.draft.heads.warmup import SERVING, TEXT, Guessing, chains, model_chains, rehearse_guess, trees
from foretell.draft.tree_merge import MergedDrafter
from foretell.runner.cuda.graphs import capture_now
from foretell.runner.cuda.warmup import DummySequences, DummyStep, dummy_chain, dummy_tree
from foretell.runner.executor import StepOutput
from foretell.sampling.topk import top
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, ScheduledSequence, Sequence

from .engine import Engine
from .verifier import VerifyCase

LOG = logging.getLogger("foretell")

SECONDS = 2.5  # of a start, of which the whole takes ten; a size takes 30 ms, where a model has 32 layers
TIMES = 2  # recorded and replayed: a graph goes to the device when it is first replayed
LONG = 1500  # tokens of a text; what is recorded for it serves for shorter ones, too
LONGER = (700, 3000)  # tokens of a text, for which other graphs are made
PROMPT, PROMPTS = 256, (128, 64, 32)  # tokens of one that comes in one step; what serves for the first does for others
IN_CHAINS = (1, 3, 4, 7, 9, 15, 16)  # guesses whose steps are recorded; others are filled up to them
IN_TREES = (3, 7, 10, 15, 16, 30, 32, 63)  # nodes likewise
MANY = 8  # texts; what is recorded for them serves for fewer
FEW_TEXTS = (2, 4, MANY)
CROWDS = (16, 32, 64)  # texts that write at once
UNREAD = (24, 48, 96, 180, 250)  # tokens of a text that a draft model has to read first, each in tiles of its own
MOST_FAILURES = 3  # of a rehearsal that goes on


class Warmup:
    """Does it piece by piece, the likeliest first: some at the start, the rest while nobody waits.

    Texts are made up and have pages of their own, so that no other text, no drafter that learns and no cost that is
    known hears of it. What fails is left to the requests themselves.
    """

    def __init__(self, engine: Engine, pieces: Callable[[Warmup], Iterable[Callable[[], None]]]) -> None:
        """`pieces`: what is to be done, such as `all_pieces`."""
        self.engine, self.made_up = engine, DummySequences(engine.runner)
        self.done = self.failures = 0  # pieces
        self._left: Iterator[Callable[[], None]] = iter(pieces(self))

    def run(self, seconds: float = SECONDS) -> None:
        """As much as can be begun in this time."""
        until = perf_counter() + seconds
        while perf_counter() < until and self.piece():
            pass

    def piece(self) -> bool:
        """Do one thing, in the time of a few steps; False when all is done."""
        try:
            do = next(self._left, None)
            if do is None:
                return False
            with capture_now():
                do()
        except Exception:  # what nobody asked for must not keep an engine from its work
            return self._failed()
        self.done += 1
        return True

    def _failed(self) -> bool:
        """Whether to go on: one size may fail where others do not, but not several."""
        self.failures += 1
        if self.failures < MOST_FAILURES:
            LOG.exception("a size could not be rehearsed; the first requests wait for it")
            return True
        LOG.exception("not all could be rehearsed; the first requests wait for what is left")
        self._left = iter(())
        return False

    def step(self, step: DummyStep) -> None:
        """A step of the target, and what its logits are asked for."""
        cached = max(0, min(step.cached, self.engine.runner.context - step.num_new_tokens - len(step.draft)))
        with self.made_up.allocate(step.sequences, cached, step.num_new_tokens, len(step.draft)) as seqs:
            shares = [ScheduledSequence.of(seq, step.num_new_tokens) for seq in seqs]
            for _ in range(TIMES if shares else 0):
                output = self.engine.runner.forward(shares, [step.draft] * len(shares))
                self._judge(shares, step.draft, output)
            if len(step.draft) > 1 and not step.draft.is_chain:
                for share in shares:
                    self.engine.runner.compact_kv(share.seq, share.length - 1, (1, 2)[: len(step.draft) - 1])

    def _judge(self, shares: list[ScheduledSequence], draft: Draft, output: StepOutput) -> None:
        """Which tokens are likeliest, which are drawn, and what drafters learn from."""
        for drawn in (False, True):
            rows = [_drawn(share) if drawn else share for share in shares]
            cases = [VerifyCase(share, draft, output.logits, i * (1 + len(draft))) for i, share in enumerate(rows)]
            self.engine.sequence_verifier(cases, output.logits, output.argmax)
        if self.engine.drafter.top_k:
            top(output.logits, self.engine.drafter.top_k)

    def guess(self, name: str, guessing: Guessing) -> None:
        """A draft of who has this name now, if it is here."""
        drafter = self.engine.drafter.drafters.get(name)
        if drafter is not None and drafter.is_ready:
            rehearse_guess(drafter, self.made_up, guessing, TIMES)


def _drawn(share: ScheduledSequence) -> ScheduledSequence:
    """The same of a text whose tokens are drawn."""
    seq = share.seq
    request = replace(seq.request, params=SamplingParams(temperature=1.0))
    return replace(share, seq=Sequence(seq.id, request, seq.tokens, seq.cached, seq.pages))


def all_pieces(rehearsal: Warmup, named: Container[str], nodes: int, most: int) -> Iterator[Callable[[], None]]:
    """For these drafters, chains and trees of up to `nodes` nodes, and trees of heads of up to `most`. The likeliest
    come first: a prompt, one text alone, what drafters that take time do for it, greedy and drawn, and drafts of all
    sizes behind it; then what serves for longer texts and for several; and in the end what would do that in less time.
    """
    arms = [name for name, arm in rehearsal.engine.drafter.drafters.items() if name in named and _takes_time(arm)]
    growing = [name for name in arms if rehearsal.engine.drafter.drafters[name].grows]
    readers = [name for name in arms if rehearsal.engine.drafter.drafters[name].reads]
    others = [name for name in arms if name not in readers]
    shapes = ((chains(nodes), others), (model_chains(nodes), readers), (trees(most, nodes), growing))
    serving = {*SERVING, nodes}
    widest = max(nodes, most if growing else 0)

    def guesses(depths: Container[int] | None = None, **changes: Any) -> Iterator[Callable[[], None]]:
        for several, names in shapes:
            some = (replace(each, **changes) for each in several if depths is None or each.budget.depth in depths)
            yield from (partial(rehearsal.guess, name, each) for each in some for name in names)

    def steps(several: Iterable[DummyStep]) -> Iterator[Callable[[], None]]:
        return (partial(rehearsal.step, each) for each in several)

    yield from steps((DummyStep(cached=0, num_new_tokens=PROMPT), DummyStep(cached=TEXT)))
    yield from guesses()
    unread = [Guessing(Budget(min(2, nodes)), cached=cached) for cached in UNREAD]
    yield from (partial(rehearsal.guess, name, each) for each in unread for name in readers if nodes)
    yield from steps(_drafts(nodes, widest, TEXT))
    yield from guesses(temperature=1.0)
    yield from steps((DummyStep(cached=LONG), *_drafts(nodes, widest, LONG, (7,), (15, 30))))
    for heat in (0.0, 1.0):
        yield from guesses(serving, cached=LONG, temperature=heat)
    if (several := min(MANY, rehearsal.engine.scheduler.max_num_seqs)) > 1:
        yield from steps(DummyStep(texts, TEXT) for texts in FEW_TEXTS if texts <= several)
        guessed = (
            (dummy_chain(3), dummy_tree(7), dummy_tree(11), dummy_tree(31)) if nodes else ()
        )  # of eight texts 32, 64, 96 and 256 rows
        yield from steps(DummyStep(several, LONG, draft=each) for each in (dummy_chain(0), *guessed))
        yield from steps((DummyStep(several, cached=0, num_new_tokens=PROMPT // several),))
        for heat in (0.0, 1.0):
            yield from guesses(serving, cached=LONG, texts=several, temperature=heat)
    yield from steps(DummyStep(cached=0, num_new_tokens=take) for take in PROMPTS)
    crowds = [texts for texts in CROWDS if texts <= rehearsal.engine.scheduler.max_num_seqs]
    yield from steps(DummyStep(texts, cached) for texts in crowds for cached in (TEXT, *LONGER[:1], LONG))
    for cached in (*LONGER, LONG):
        yield from steps((DummyStep(cached=cached), *_drafts(nodes, widest, cached)))
        yield from guesses(cached=cached)
        yield from guesses(cached=cached, temperature=1.0)


def _drafts(
    nodes: int, widest: int, cached: int, in_chains: tuple[int, ...] = IN_CHAINS, in_trees: tuple[int, ...] = IN_TREES
) -> Iterator[DummyStep]:
    """Chains and trees behind a text, the smaller ones first. The last serve for all others: the largest tree, and one
    that was let go a node farther."""
    yield from (DummyStep(cached=cached, draft=dummy_chain(count)) for count in in_chains if count <= nodes)
    yield from (DummyStep(cached=cached, draft=dummy_tree(count)) for count in in_trees if count < widest)
    if nodes:
        yield from (DummyStep(cached=cached, draft=dummy_tree(count)) for count in (widest, widest + 1))


def _takes_time(drafter: Drafter) -> bool:
    """Not one whose guesses are found on the host, nor several behind one name, who are there by their own, too."""
    return not drafter.free and not isinstance(drafter, MergedDrafter)
