"""Simulator for controllers: sequences, drafters and a machine defined by numbers and seeds, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

from foretell.control.controller import Controller
from foretell.control.latency_model import CostPrior
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

WRONG = -1  # a token that no sequence contains

AcceptanceFn = Callable[[int, int], float]  # acceptance probability by request and position


@dataclass(frozen=True)
class SimulatedDrafter:
    """A drafter with given acceptance and cost. One with `others` makes trees."""

    name: str
    acceptance: AcceptanceFn
    seconds: float = 0.0  # per level of a chain
    free: bool = True
    others: tuple[float, ...] = ()  # where the first choice is wrong, how often each further choice is right
    node_share: float = 0.2  # part of `seconds` that grows with nodes
    start: float = 0.0  # seconds before the first level


@dataclass(frozen=True)
class Machine:
    """Seconds of a step by rows and cached tokens, and the noise of its clock."""

    base: float = 0.03
    row: float = 0.001
    token: float = 1e-6
    noise: float = 0.05  # standard deviation of the logarithm
    outliers: float = 0.01  # share of steps that take several times as long
    sizes: tuple[int, ...] = ()  # row counts that a step is padded to
    prior_row: float = CostPrior.row  # what the controller assumes of a row before any step, over a step of one
    poll: float = 0.0  # host seconds to ask the free drafters for the drafts of one sequence

    def expected_seconds(self, rows: int, context: int) -> float:
        """Return the seconds of a step without noise."""
        padded = next((size for size in self.sizes if rows <= size), rows)
        return self.base + self.row * (padded - 1) + self.token * context

    def seconds(self, rows: int, context: int, rng: random.Random) -> float:
        """Return the seconds of a step with noise and outliers."""
        noise = rng.lognormvariate(0.0, self.noise)
        return (
            self.expected_seconds(rows, context) * noise * (rng.uniform(2, 8) if rng.random() < self.outliers else 1.0)
        )


@dataclass(frozen=True)
class Scenario:
    """Requests to simulate, with `load(i)` of them running at once after i were started."""

    drafters: tuple[SimulatedDrafter, ...]
    machine: Machine = Machine()
    requests: int = 50
    tokens: int = 128  # output tokens of each
    load: Callable[[int], int] = field(default=lambda started: 1)
    choice: Callable[[int], SpeculationChoice] = field(default=lambda request: SpeculationChoice())
    temperature: Callable[[int], float] = field(default=lambda request: 0.0)
    seed: int = 0


@dataclass
class SimulationResult:
    """Totals of a run. Times are without noise, so that two runs can be compared."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    speeds: dict[int, float] = field(default_factory=dict)  # tokens per second of each request, from its start
    lengths: list[float] = field(default_factory=list)  # draft tokens per sequence in each step


class Simulator:
    """Runs a controller through a scenario in the way the engine does."""

    def __init__(self, scenario: Scenario, controller: Controller) -> None:
        self.scenario, self.controller = scenario, controller
        self.drafters = {drafter.name: drafter for drafter in scenario.drafters}
        self.noise = random.Random(scenario.seed)
        self._started_at: dict[int, float] = {}
        self.started = self.finished = 0
        self.running: list[Sequence] = []
        self.result = SimulationResult()
        self._ticks = 0.0

    def clock(self) -> float:
        """Return the simulated time, as a clock for a controller."""
        return self.result.seconds

    def poll_clock(self) -> float:
        """Return the simulated time with at least 0.1 ms between two calls."""
        self._ticks += 0.0 if self.scenario.machine.poll else 1e-4
        return self.result.seconds + self._ticks

    def run(self) -> SimulationResult:
        for _ in self.steps():
            pass
        return self.result

    def steps(self) -> Iterator[list[Sequence]]:
        """Run step by step and yield the running sequences before each."""
        while self.finished < self.scenario.requests:
            self._admit()
            yield self.running
            self._step()

    def _admit(self) -> None:
        while len(self.running) < self.scenario.load(self.started) and self.started < self.scenario.requests:
            self._started_at[self.started] = self.clock()
            self.running.append(self.sequence(self.started))
            self.started += 1

    def sequence(self, number: int) -> Sequence:
        """Return the sequence of a request."""
        params = SamplingParams(temperature=self.scenario.temperature(number))
        choice = self.scenario.choice(number)
        drafters, tokens = tuple(self.drafters), self.scenario.tokens
        request = Request(str(number), (0,), params, 0, tokens, drafters=drafters, speculation=choice)
        return Sequence(number, request, [0])

    def _step(self) -> None:
        began = self.clock()
        polled, length = self.controller.wants_free_drafts(self.running)
        self.result.seconds += self.scenario.machine.poll * len(polled)
        free = [drafter for drafter in self.drafters.values() if drafter.free]
        free_drafts = {seq.id: {each.name: self.draft(seq, each, length) for each in free} for seq in polled}
        budgets = self.controller.choose_draft_lengths(self.running, free_drafts)
        scheduled = [ScheduledSequence.of(seq, 1, budget) for seq, budget in zip(self.running, budgets, strict=True)]
        drafts = [self._propose(each) for each in scheduled]
        rows, context = len(scheduled) + sum(map(len, drafts)), sum(len(seq.tokens) for seq in self.running)
        draft_seconds = self._draft_seconds(budgets, drafts)
        machine = self.scenario.machine
        target_seconds = machine.seconds(rows, context, self.noise)
        host_seconds = self.clock() - began
        self.result.seconds += draft_seconds + machine.expected_seconds(rows, context)
        self.result.steps += 1
        self.result.drafted += rows - len(scheduled)
        self.result.lengths.append((rows - len(scheduled)) / len(scheduled))
        results = [self._verify(each, draft) for each, draft in zip(scheduled, drafts, strict=True)]
        self.controller.observe(results, StepTimes(host_seconds + draft_seconds, target_seconds, draft_seconds))
        for seq in [seq for seq in self.running if seq.remaining_tokens <= 0]:
            self.running.remove(seq)
            self.controller.forget(seq)
            self.result.speeds[seq.id] = seq.num_output_tokens / (self.clock() - self._started_at.pop(seq.id))
            self.finished += 1

    def _draft_seconds(self, budgets: list[Budget], drafts: list[Draft]) -> float:
        """Return the time of all drafts: those of one drafter run as a batch, so the deepest sets the time.

        They run all levels of their budgets, as a single graph does.
        """
        total = 0.0
        for drafter in self.drafters.values():
            own = [budget for budget in budgets if budget.drafter == drafter.name and budget.nodes]
            if own:
                depth, nodes = max(budget.depth for budget in own), sum(budget.nodes for budget in own)
                share = drafter.node_share
                total += drafter.start + drafter.seconds * ((1 - share) * depth + share * nodes)
        return total

    def _propose(self, scheduled: ScheduledSequence) -> Draft:
        budget = scheduled.budget
        if budget.is_tree and self.drafters[budget.drafter].others:
            return self.tree(scheduled.seq, self.drafters[budget.drafter], budget)
        return self.draft(scheduled.seq, self.drafters[budget.drafter], budget.depth) if budget.nodes else Draft()

    def draft(self, seq: Sequence, drafter: SimulatedDrafter, length: int) -> Draft:
        """Return a chain that depends on the drafter and the tokens alone."""
        rng = random.Random(f"{self.scenario.seed} {drafter.name} {seq.id} {len(seq.tokens)}")
        tokens, right = [], True
        for depth in range(length):
            position = len(seq.tokens) + depth
            right = right and rng.random() < drafter.acceptance(seq.id, position)
            tokens.append(self.output_token(seq, position) if right else WRONG)
        return Draft.chain(tokens, drafter.name)

    def tree(self, seq: Sequence, drafter: SimulatedDrafter, budget: Budget) -> Draft:
        """Return the most likely nodes of a tree. At each depth at most one choice is the output token."""
        rng = random.Random(f"{self.scenario.seed} {drafter.name} {seq.id} {len(seq.tokens)}")
        first = [drafter.acceptance(seq.id, len(seq.tokens) + depth) for depth in range(budget.depth)]
        ranks = [[rate, *((1 - rate) * other for other in drafter.others)] for rate in first]
        right = [_sample_rank(rng.random(), each) for each in ranks]
        heap, tokens, parents = [(-ranks[0][0], 0, -1, 0, 0, True)], list[int](), list[int]()
        while heap and len(tokens) < budget.nodes:
            probability, _, parent, depth, rank, on_path = heappop(heap)
            is_output = on_path and right[depth] == rank
            node, before = len(tokens), probability / ranks[depth][rank]
            tokens.append(self.output_token(seq, len(seq.tokens) + depth) if is_output else WRONG)
            parents.append(parent)
            if rank + 1 < len(ranks[depth]):
                heappush(heap, (before * ranks[depth][rank + 1], len(tokens), parent, depth, rank + 1, on_path))
            if depth + 1 < budget.depth:
                heappush(heap, (probability * ranks[depth + 1][0], -len(tokens), node, depth + 1, 0, is_output))
        return Draft(tuple(tokens), tuple(parents), drafter.name)

    def output_token(self, seq: Sequence, position: int) -> int:
        return position + 1000 * seq.id

    def _verify(self, scheduled: ScheduledSequence, draft: Draft) -> StepResult:
        seq, path = scheduled.seq, list[int]()
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            right = self.output_token(seq, len(seq.tokens) + len(path))
            if token == right and parent == (path[-1] if path else -1):
                path.append(node)
        count = min(len(path) + 1, seq.remaining_tokens)
        new_tokens = tuple(self.output_token(seq, len(seq.tokens) + i) for i in range(count))
        seq.tokens += new_tokens
        seq.num_computed_tokens = len(seq.tokens) - 1
        self.result.tokens += len(new_tokens)
        return StepResult(scheduled, draft, VerifyResult(tuple(path), new_tokens[-1]), new_tokens=new_tokens)


def _sample_rank(number: float, rates: list[float]) -> int:
    """Return the index of the case that a uniform number in [0, 1) selects, or -1 for none."""
    for rank, end in enumerate(accumulate(rates)):
        if number < end:
            return rank
    return -1


class FixedDrafterController(Controller):
    """A fixed length by one drafter, as the baseline of other controllers."""

    def __init__(self, drafter: str, num_tokens: int, max_depth: int = 0) -> None:
        self.drafter, self.num_tokens, self.max_depth = drafter, num_tokens, max_depth

    def choose_draft_lengths(
        self, seqs: list[Sequence], free_drafts: Mapping[int, Mapping[str, Draft]]
    ) -> list[Budget]:
        return [self._budget(seq.remaining_tokens - 1) if seq.is_decoding else Budget() for seq in seqs]

    def _budget(self, limit: int) -> Budget:
        if not self.max_depth:
            return Budget(min(self.num_tokens, limit), self.drafter)
        return Budget(self.num_tokens if limit else 0, self.drafter, max_depth=min(self.max_depth, limit))


def best_fixed(scenario: Scenario, lengths: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16)) -> tuple[float, float]:
    """Return the seconds of the best fixed drafter and length in hindsight, and of plain decoding."""
    times = {
        (drafter.name, length): Simulator(scenario, FixedDrafterController(drafter.name, length)).run().seconds
        for drafter in scenario.drafters
        for length in lengths
    }
    return min(times.values()), times[scenario.drafters[0].name, 0]


def best_tree(scenario: Scenario, depths: tuple[int, ...] = (2, 4, 6, 8), widths: tuple[int, ...] = (2, 4, 8)) -> float:
    """Return the seconds of the best fixed tree in hindsight."""
    drafters = [drafter.name for drafter in scenario.drafters if drafter.others]
    fixed = [
        FixedDrafterController(drafter, depth * width, depth)
        for drafter in drafters
        for depth in depths
        for width in widths
    ]
    return min(Simulator(scenario, each).run().seconds for each in fixed)
