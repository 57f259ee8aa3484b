"""A world without a model to try controllers in: texts, drafters and a machine made of numbers and seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

from foretell.control.controller import Controller
from foretell.sampling_params import SamplingParams
from foretell.types import (
    Budget,
    Draft,
    Request,
    ScheduledSequence,
    Sequence,
    SpeculationChoice,
    StepResult,
    StepTimes,
    VerifyResult,
)

WRONG = -1  # a token no text has

Chance = Callable[[int, int], float]  # how likely a guess is to stand, by request and place in its text


@dataclass(frozen=True)
class Arm:
    """A drafter: how often it is right, what it costs a node, and whether it shows its guesses for nothing.

    One with `others` makes trees: where its first choice is wrong, so often is each of its others right.
    """

    name: str
    chance: Chance
    seconds: float = 0.0
    free: bool = True
    others: tuple[float, ...] = ()
    node: float = 0.2  # of its seconds what a node adds beside others of its level
    start: float = 0.0  # seconds before the first level


@dataclass(frozen=True)
class Machine:
    """What a step costs by rows and cached tokens, and how restless the clock is."""

    base: float = 0.03
    row: float = 0.001
    token: float = 1e-6
    noise: float = 0.05
    hiccup: float = 0.01  # how often a step takes several times as long
    sizes: tuple[int, ...] = ()  # rows that a step is filled up to

    def usual(self, rows: int, context: int) -> float:
        """Seconds of a step without noise."""
        run = next((size for size in self.sizes if rows <= size), rows)
        return self.base + self.row * (run - 1) + self.token * context

    def seconds(self, rows: int, context: int, rng: random.Random) -> float:
        usual = self.usual(rows, context)
        return usual * rng.lognormvariate(0.0, self.noise) * (rng.uniform(2, 8) if rng.random() < self.hiccup else 1.0)


@dataclass(frozen=True)
class Scenario:
    """Requests to be written: so many, so long, `load(i)` of them at once when i were begun."""

    arms: tuple[Arm, ...]
    machine: Machine = Machine()
    requests: int = 50
    tokens: int = 128
    load: Callable[[int], int] = field(default=lambda begun: 1)
    choice: Callable[[int], SpeculationChoice] = field(default=lambda request: SpeculationChoice())
    temperature: Callable[[int], float] = field(default=lambda request: 0.0)
    seed: int = 0


@dataclass
class Result:
    """What a run took by the scenario's own clock, without its noise, so that two runs can be compared."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    speeds: dict[int, float] = field(default_factory=dict)  # tokens a second of each text, from when it was begun
    lengths: list[float] = field(default_factory=list)  # nodes a text in each step


class World:
    """Runs a controller through a scenario as the engine would."""

    def __init__(self, scenario: Scenario, controller: Controller) -> None:
        self.scenario, self.controller = scenario, controller
        self.arms = {arm.name: arm for arm in scenario.arms}
        self.noise = random.Random(scenario.seed)
        self._begun: dict[int, float] = {}
        self.started = self.finished = 0
        self.running: list[Sequence] = []
        self.result = Result()

    def clock(self) -> float:
        """The scenario's own time, for a controller to look at."""
        return self.result.seconds

    def run(self) -> Result:
        for _ in self.steps():
            pass
        return self.result

    def steps(self) -> Iterator[list[Sequence]]:
        """Step by step, to be watched: before each the texts that are written in it."""
        while self.finished < self.scenario.requests:
            self._admit()
            yield self.running
            self._step()

    def _admit(self) -> None:
        while len(self.running) < self.scenario.load(self.started) and self.started < self.scenario.requests:
            request = Request(
                str(self.started),
                (0,),
                SamplingParams(temperature=self.scenario.temperature(self.started)),
                0,
                self.scenario.tokens,
                drafters=tuple(self.arms),
                speculation=self.scenario.choice(self.started),
            )
            self._begun[self.started] = self.clock()
            self.running.append(Sequence(self.started, request, [0]))
            self.started += 1

    def _step(self) -> None:
        asked, nodes = self.controller.wants_free_drafts(self.running)
        free = [arm for arm in self.arms.values() if arm.free]
        offers = {seq.id: {arm.name: self.draft(seq, arm, nodes) for arm in free} for seq in asked}
        budgets = self.controller.choose_draft_lengths(self.running, offers)
        shares = [ScheduledSequence.of(seq, 1, budget) for seq, budget in zip(self.running, budgets, strict=True)]
        drafts = [self._drafted(share) for share in shares]
        rows, context = len(shares) + sum(map(len, drafts)), sum(len(seq.tokens) for seq in self.running)
        drafting = self._drafting(budgets)
        machine = self.scenario.machine
        running = machine.seconds(rows, context, self.noise)
        self.result.seconds += drafting + machine.usual(rows, context)
        self.result.steps += 1
        self.result.drafted += rows - len(shares)
        self.result.lengths.append((rows - len(shares)) / len(shares))
        outcomes = [self._judge(share, draft) for share, draft in zip(shares, drafts, strict=True)]
        self.controller.observe(outcomes, StepTimes(drafting, running))
        for seq in [seq for seq in self.running if seq.remaining_tokens <= 0]:
            self.running.remove(seq)
            self.controller.forget(seq)
            self.result.speeds[seq.id] = self.scenario.tokens / (self.clock() - self._begun.pop(seq.id))
            self.finished += 1

    def _drafting(self, budgets: list[Budget]) -> float:
        """Drafts of one drafter run side by side: the deepest sets the time, and each node adds a little."""
        total = 0.0
        for arm in self.arms.values():
            mine = [budget for budget in budgets if budget.drafter == arm.name and budget.nodes]
            if mine:
                deepest, nodes = max(budget.depth for budget in mine), sum(budget.nodes for budget in mine)
                total += arm.start + arm.seconds * ((1 - arm.node) * deepest + arm.node * nodes)
        return total

    def _drafted(self, share: ScheduledSequence) -> Draft:
        budget = share.budget
        if budget.is_tree and self.arms[budget.drafter].others:
            return self.tree(share.seq, self.arms[budget.drafter], budget)
        return self.draft(share.seq, self.arms[budget.drafter], budget.depth) if budget.nodes else Draft()

    def draft(self, seq: Sequence, arm: Arm, nodes: int) -> Draft:
        """The same for the same text, whoever asks: a guess depends on the tokens alone."""
        rng = random.Random(f"{self.scenario.seed} {arm.name} {seq.id} {len(seq.tokens)}")
        tokens, right = [], True
        for depth in range(nodes):
            place = len(seq.tokens) + depth
            right = right and rng.random() < arm.chance(seq.id, place)
            tokens.append(self.text(seq, place) if right else WRONG)
        return Draft.chain(tokens, arm.name)

    def tree(self, seq: Sequence, arm: Arm, budget: Budget) -> Draft:
        """The likeliest nodes by how often choices are right; on the text's own way one choice is, or none."""
        rng = random.Random(f"{self.scenario.seed} {arm.name} {seq.id} {len(seq.tokens)}")
        first = [arm.chance(seq.id, len(seq.tokens) + depth) for depth in range(budget.depth)]
        ranks = [[rate, *((1 - rate) * other for other in arm.others)] for rate in first]
        right = [_drawn(rng.random(), each) for each in ranks]
        waiting, tokens, parents = [(-ranks[0][0], 0, -1, 0, 0, True)], list[int](), list[int]()
        while waiting and len(tokens) < budget.nodes:
            chance, _, parent, depth, rank, on_way = heappop(waiting)
            here = on_way and right[depth] == rank
            node, before = len(tokens), chance / ranks[depth][rank]
            tokens.append(self.text(seq, len(seq.tokens) + depth) if here else WRONG)
            parents.append(parent)
            if rank + 1 < len(ranks[depth]):
                heappush(waiting, (before * ranks[depth][rank + 1], len(tokens), parent, depth, rank + 1, on_way))
            if depth + 1 < budget.depth:
                heappush(waiting, (chance * ranks[depth + 1][0], -len(tokens), node, depth + 1, 0, here))
        return Draft(tuple(tokens), tuple(parents), arm.name)

    def text(self, seq: Sequence, place: int) -> int:
        return place + 1000 * seq.id

    def _judge(self, share: ScheduledSequence, draft: Draft) -> StepResult:
        seq, path = share.seq, list[int]()
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if token != WRONG and parent == (path[-1] if path else -1):
                path.append(node)
        kept = tuple(self.text(seq, len(seq.tokens) + i) for i in range(min(len(path) + 1, seq.remaining_tokens)))
        seq.tokens += kept
        seq.cached = len(seq.tokens) - 1
        self.result.tokens += len(kept)
        return StepResult(share, draft, VerifyResult(tuple(path), kept[-1]), new_tokens=kept)


def _drawn(number: float, rates: list[float]) -> int:
    """Which of several cases a number in 0..1 is; -1 where none is."""
    for rank, end in enumerate(accumulate(rates)):
        if number < end:
            return rank
    return -1


class Always(Controller):
    """A fixed length by one drafter, to measure others against."""

    def __init__(self, arm: str, nodes: int, levels: int = 0) -> None:
        self.arm, self.nodes, self.levels = arm, nodes, levels

    def choose_draft_lengths(self, seqs: list[Sequence], offers: Mapping[int, Mapping[str, Draft]]) -> list[Budget]:
        return [
            self._budget(seq.remaining_tokens - 1) if seq.is_decoding else Budget() for seq in seqs
        ]  # as every controller does

    def _budget(self, room: int) -> Budget:
        if not self.levels:
            return Budget(min(self.nodes, room), self.arm)
        return Budget(self.nodes if room else 0, self.arm, max_depth=min(self.levels, room))


def best_fixed(scenario: Scenario, lengths: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16)) -> tuple[float, float]:
    """Seconds of the best drafter and length in hindsight, and of plain decoding."""
    times = {
        (arm.name, nodes): World(scenario, Always(arm.name, nodes)).run().seconds
        for arm in scenario.arms
        for nodes in lengths
    }
    return min(times.values()), times[scenario.arms[0].name, 0]


def best_tree(scenario: Scenario, levels: tuple[int, ...] = (2, 4, 6, 8), wide: tuple[int, ...] = (2, 4, 8)) -> float:
    """Seconds of the best fixed tree in hindsight."""
    arms = [arm.name for arm in scenario.arms if arm.others]
    always = [Always(arm, depth * each, depth) for arm in arms for depth in levels for each in wide]
    return min(World(scenario, each).run().seconds for each in always)
