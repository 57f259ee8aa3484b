"""A world without a model to try controllers in: texts, drafters and a machine made of numbers and seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from foretell.params import SamplingParams
from foretell.types import Budget, Draft, Outcome, Request, Sequence, Share, SpeculationChoice, StepTimes, Verdict

from .controller import Controller

WRONG = -1  # a token no text has

Chance = Callable[[int, int], float]  # how likely a guess is to stand, by request and place in its text


@dataclass(frozen=True)
class Arm:
    """A drafter: how often it is right, what it costs a node, and whether it shows its guesses for nothing."""

    name: str
    chance: Chance
    seconds: float = 0.0
    free: bool = True


@dataclass(frozen=True)
class Machine:
    """What a step costs by rows and cached tokens, and how restless the clock is."""

    base: float = 0.03
    row: float = 0.001
    token: float = 1e-6
    noise: float = 0.05
    hiccup: float = 0.01  # how often a step takes several times as long

    def seconds(self, rows: int, context: int, rng: random.Random) -> float:
        usual = self.base + self.row * (rows - 1) + self.token * context
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
                SamplingParams(temperature=0.0),
                0,
                self.scenario.tokens,
                drafters=tuple(self.arms),
                speculation=self.scenario.choice(self.started),
            )
            self._begun[self.started] = self.clock()
            self.running.append(Sequence(self.started, request, [0]))
            self.started += 1

    def _step(self) -> None:
        asked, nodes = self.controller.asks(self.running)
        free = [arm for arm in self.arms.values() if arm.free]
        offers = {seq.id: {arm.name: self.draft(seq, arm, nodes) for arm in free} for seq in asked}
        budgets = self.controller.budgets(self.running, offers)
        shares = [Share.of(seq, 1, budget) for seq, budget in zip(self.running, budgets, strict=True)]
        drafts = [self._drafted(share) for share in shares]
        rows, context = len(shares) + sum(map(len, drafts)), sum(len(seq.tokens) for seq in self.running)
        drafting = self._drafting(budgets)
        running = self.scenario.machine.seconds(rows, context, self.noise)
        still = self.scenario.machine
        self.result.seconds += drafting + still.base + still.row * (rows - 1) + still.token * context
        self.result.steps += 1
        self.result.drafted += rows - len(shares)
        self.result.lengths.append((rows - len(shares)) / len(shares))
        outcomes = [self._judge(share, draft) for share, draft in zip(shares, drafts, strict=True)]
        self.controller.observe(outcomes, StepTimes(drafting, running))
        for seq in [seq for seq in self.running if seq.room <= 0]:
            self.running.remove(seq)
            self.controller.forget(seq)
            self.result.speeds[seq.id] = self.scenario.tokens / (self.clock() - self._begun.pop(seq.id))
            self.finished += 1

    def _drafting(self, budgets: list[Budget]) -> float:
        """Drafts of one drafter run side by side: the deepest sets the time, and each node adds a little."""
        total = 0.0
        for arm in self.arms.values():
            nodes = [budget.nodes for budget in budgets if budget.drafter == arm.name and budget.nodes]
            if nodes:
                total += arm.seconds * (0.8 * max(nodes) + 0.2 * sum(nodes))
        return total

    def _drafted(self, share: Share) -> Draft:
        budget = share.budget
        return self.draft(share.seq, self.arms[budget.drafter], budget.nodes) if budget.nodes else Draft()

    def draft(self, seq: Sequence, arm: Arm, nodes: int) -> Draft:
        """The same for the same text, whoever asks: a guess depends on the tokens alone."""
        rng = random.Random(f"{self.scenario.seed} {arm.name} {seq.id} {len(seq.tokens)}")
        tokens, right = [], True
        for depth in range(nodes):
            place = len(seq.tokens) + depth
            right = right and rng.random() < arm.chance(seq.id, place)
            tokens.append(self.text(seq, place) if right else WRONG)
        return Draft.chain(tokens, arm.name)

    def text(self, seq: Sequence, place: int) -> int:
        return place + 1000 * seq.id

    def _judge(self, share: Share, draft: Draft) -> Outcome:
        seq = share.seq
        stood = next((i for i, token in enumerate(draft.tokens) if token == WRONG), len(draft))
        kept = tuple(self.text(seq, len(seq.tokens) + i) for i in range(min(stood + 1, seq.room)))
        seq.tokens += kept
        seq.cached = len(seq.tokens) - 1
        self.result.tokens += len(kept)
        return Outcome(share, draft, Verdict(tuple(range(stood)), kept[-1]), kept=kept)


class Always(Controller):
    """A fixed length by one drafter, to measure others against."""

    def __init__(self, arm: str, nodes: int) -> None:
        self.arm, self.nodes = arm, nodes

    def budgets(self, seqs: list[Sequence], offers: Mapping[int, Mapping[str, Draft]]) -> list[Budget]:
        return [Budget(min(self.nodes, seq.room - 1), self.arm) for seq in seqs]


def best_fixed(scenario: Scenario, lengths: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16)) -> tuple[float, float]:
    """Seconds of the best drafter and length in hindsight, and of plain decoding."""
    times = {
        (arm.name, nodes): World(scenario, Always(arm.name, nodes)).run().seconds
        for arm in scenario.arms
        for nodes in lengths
    }
    return min(times.values()), times[scenario.arms[0].name, 0]
