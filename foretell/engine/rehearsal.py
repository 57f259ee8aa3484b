"""What the first requests will need of a CUDA device, done before they come: a graph is recorded when its sizes come
again, the libraries make their handles with their first work, and all of that takes longer than a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter

from foretell.draft.base import Drafter
from foretell.draft.merging import Merged
from foretell.draft.rehearsal import CHAINS, DEEPER, SHORT, TEXT, TREES, Guessing, rehearse_guess
from foretell.params import SamplingParams
from foretell.runner.cuda_warm import Nothing, chain, long_tree, tree
from foretell.runner.executor import StepOutput
from foretell.runner.made_up import MadeUp
from foretell.sampling.top import top
from foretell.types import Draft, Sequence, Share

from .engine import Engine
from .judge import Case

LOG = logging.getLogger("foretell")

SECONDS = 2.5  # of a start, of which the whole takes ten; a size takes 30 ms, where a model has 32 layers
TIMES = 3  # plainly, recorded, and replayed: a graph goes to the device when it is first replayed
BRIEF = 20  # tokens of a text whose keys fill no part: its trees are attended to in other tiles
LONGER = (700, 1500)  # tokens of a text, for which other graphs are made
PROMPTS = (128, 64, 32, 16)  # tokens of a prompt that comes in one step; the likeliest, 256, is done before
WIDE = (32, 63, 64)  # nodes of a tree that a head grows
FLAT = 9  # nodes up to which no tree is deeper than the first size of its tables
FEW_TEXTS = (2, 4, 8)


class Rehearsal:
    """Does it piece by piece, the likeliest first: some at the start, the rest while nobody waits.

    Texts are made up and have pages of their own, so that no other text, no drafter that learns and no cost that is
    known hears of it. What fails is left to the requests themselves.
    """

    def __init__(self, engine: Engine, pieces: Callable[[Rehearsal], Iterable[Callable[[], None]]]) -> None:
        """`pieces`: what is to be done, such as `all_pieces`."""
        self.engine, self.made_up = engine, MadeUp(engine.runner)
        self.done = 0  # pieces
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
            do()
        except Exception:  # what nobody asked for must not keep an engine from its work
            LOG.exception("not all could be rehearsed; the first requests wait for what is left")
            self._left = iter(())
            return False
        self.done += 1
        return True

    def step(self, step: Nothing) -> None:
        """A step of the target, and what its logits are asked for."""
        with self.made_up.texts(step.texts, step.cached, step.take, len(step.draft)) as seqs:
            shares = [Share.of(seq, step.take) for seq in seqs]
            for _ in range(TIMES if shares else 0):
                output = self.engine.runner.forward(shares, [step.draft] * len(shares))
                self._judge(shares, step.draft, output)
            if len(step.draft) > 1 and not step.draft.is_chain:
                for share in shares:
                    self.engine.runner.keep(share.seq, share.length - 1, (1, 2)[: len(step.draft) - 1])

    def _judge(self, shares: list[Share], draft: Draft, output: StepOutput) -> None:
        """Which tokens are likeliest, which are drawn, and what drafters learn from."""
        for drawn in (False, True):
            rows = [_drawn(share) if drawn else share for share in shares]
            cases = [Case(share, draft, output.logits, i * (1 + len(draft))) for i, share in enumerate(rows)]
            self.engine.judge(cases, output.logits, output.likeliest)
        if self.engine.drafter.wants_top:
            top(output.logits, self.engine.drafter.wants_top)

    def guess(self, name: str, guessing: Guessing) -> None:
        """A draft of who has this name now, if it is here."""
        drafter = self.engine.drafter.arms.get(name)
        if drafter is not None and drafter.ready:
            rehearse_guess(drafter, self.made_up, guessing, TIMES)


def _drawn(share: Share) -> Share:
    """The same of a text whose tokens are drawn."""
    seq = share.seq
    request = replace(seq.request, params=SamplingParams(temperature=1.0))
    return replace(share, seq=Sequence(seq.id, request, seq.tokens, seq.cached, seq.pages))


def all_pieces(rehearsal: Rehearsal, named: Container[str], nodes: int, most: int) -> Iterator[Callable[[], None]]:
    """For these drafters, chains and trees of up to `nodes` nodes, and trees of heads of up to `most`. The likeliest
    come first: a prompt, one text alone, what drafters that take time do for it, and drafts of all sizes behind it."""
    arms = [name for name, arm in rehearsal.engine.drafter.arms.items() if name in named and _takes_time(arm)]
    growing = [name for name in arms if rehearsal.engine.drafter.arms[name].grows]
    chains, trees = _within(CHAINS, nodes), _within(TREES, most)

    def guesses(several: Iterable[Guessing], names: list[str] = arms) -> Iterator[Callable[[], None]]:
        return (partial(rehearsal.guess, name, each) for each in several for name in names)

    def steps(several: Iterable[Nothing]) -> Iterator[Callable[[], None]]:
        return (partial(rehearsal.step, each) for each in several)

    yield from steps((Nothing(cached=0, take=256), Nothing(cached=TEXT)))
    yield from guesses(chains)
    yield from steps(_drafts(nodes, TEXT))
    yield from guesses(trees, growing)
    yield from steps(Nothing(cached=TEXT, draft=tree(each)) for each in WIDE if growing and each <= most)
    yield from steps(Nothing(cached=0, take=take) for take in PROMPTS)
    yield from steps(each for count in range(nodes + 1) for each in _trees(count, BRIEF))
    yield from guesses(replace(each, cached=SHORT) for each in chains)
    yield from guesses(replace(each, temperature=1.0) for each in chains)
    yield from steps(Nothing(texts, TEXT) for texts in FEW_TEXTS)
    for cached in LONGER:
        yield from steps((Nothing(cached=cached), *_drafts(nodes, cached)))
        yield from guesses(replace(each, cached=cached) for each in chains)
    yield from guesses(_within(DEEPER, nodes))
    yield from guesses((replace(each, cached=SHORT) for each in trees), growing)


def _within(several: Iterable[Guessing], nodes: int) -> list[Guessing]:
    return [each for each in several if each.budget.nodes <= nodes]


def _drafts(nodes: int, cached: int) -> Iterator[Nothing]:
    """Chains and trees behind a text, the smaller ones first."""
    for count in range(1, nodes + 1):
        yield Nothing(cached=cached, draft=chain(count))
        yield from _trees(count, cached)


def _trees(count: int, cached: int) -> Iterator[Nothing]:
    """Of so many nodes."""
    if count > 1:
        yield Nothing(cached=cached, draft=tree(count))
    if count > FLAT:
        yield Nothing(cached=cached, draft=long_tree(count))


def _takes_time(drafter: Drafter) -> bool:
    """Not one whose guesses are found on the host, nor several behind one name, who are there by their own, too."""
    return not drafter.free and not isinstance(drafter, Merged)
