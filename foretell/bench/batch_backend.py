"""Writes several texts at once with our own engine, and takes the time of decoding alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from foretell.bench.drafter_slots import DrafterSlot, DrafterSlots
from foretell.bench.engine_backend import NO_GUESS, EngineBackend, write
from foretell.bench.measure import PLAIN, Batch, BatchResult, MeasureJob, Variant, again, long_enough, variations
from foretell.bench.never_slower_grid import STAND_INS
from foretell.bench.plan import Plan
from foretell.bench.prompt import BenchPrompt
from foretell.bench.synthetic import Setting
from foretell.bench.synthetic_drafters import SetRateOracle, stand_in
from foretell.draft.base import Drafter
from foretell.errors import RequestError
from foretell.llm import LLM
from foretell.types import Request, SpeculationChoice


class EngineBatches:
    """Arms take turns on one engine.

    Prompts are in its cache before they do, and the clock starts when every text has its first token: what is timed
    is decoding. A controller stays for the whole run, as a server's does; drafters are made anew each round, because
    one that remembers finished texts would meet in the second what it wrote in the first.
    """

    def __init__(self, llm: LLM, seats: DrafterSlots, plan: Plan) -> None:
        self.llm, self._make, self._plan = llm, seats, plan
        self._alone = EngineBackend(llm, seats)
        self._seats: dict[str, DrafterSlot] = {PLAIN.name: seats.make(PLAIN.speculation)}
        self._texts: dict[tuple[int, ...], tuple[int, ...]] = {}  # plain ones of the batches at hand, by prompt
        self._names = itertools.count()

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        """So many batches of texts that no other is like; those that do not fit the model's context are left out."""
        fitting = [item for item in items if self._alone.fits(again(item, 1), self._plan)]
        if not fitting:
            task = items[0].task if items else "the workload"
            raise RequestError("max_tokens", f"leaves no prompt of {task} that fits into this model's context")
        self._texts.clear()
        asked = [long_enough(item, self._plan) for item in variations(fitting, batch * batches)]
        jobs = [job for item in asked for job in self._alone.prepare(item, temperature, self._plan)]
        found = [tuple(jobs[i : i + batch]) for i in range(0, len(jobs), batch)]
        for each in found:
            for job, text in zip(each, self.write(PLAIN, each).texts, strict=True):
                self._texts[job.prompt] = text
        return found

    def refresh(self, arms: Sequence[Variant]) -> None:
        """New drafters where the old ones sat."""
        for arm in arms:
            drafter = self._drafter(arm)
            seat = self._seats.get(arm.name)
            self._seats[arm.name] = self._make.make(arm.speculation, drafter) if seat is None else seat.pass_on(drafter)

    def _drafter(self, arm: Variant) -> Drafter:
        if arm.speculation.drafter in STAND_INS:
            step = self.llm.assembly.profiler.controller.costs.seconds(1)
            return stand_in(arm.speculation.drafter, self._texts, self.llm.engine.runner.model.config.vocab, step)
        return self._make.drafter(arm.speculation)

    def write(self, arm: Variant, batch: Batch) -> BatchResult:
        """Write a batch and take the time."""
        self._seats[arm.name].take()
        stats = self.llm.engine.stats
        failures = stats.drafter_failures
        course = write(self.llm, [self._request(arm, job) for job in batch])
        return BatchResult(course.texts, course.steps, course.timed, course.decoding, stats.drafter_failures - failures)

    def _request(self, arm: Variant, job: MeasureJob) -> Request:
        choice = SpeculationChoice(prediction=job.prediction if arm.reads_prediction else None)
        choice = NO_GUESS if arm == PLAIN else choice
        (request,) = self.llm.assembly.requests.make(f"batch-{next(self._names)}", list(job.prompt), job.params, choice)
        return request


class SyntheticBatches(EngineBatches):
    """Arms that are settings: each has an oracle of its own."""

    def __init__(self, llm: LLM, seats: DrafterSlots, plan: Plan, settings: Mapping[str, Setting]) -> None:
        super().__init__(llm, seats, plan)
        self._settings = settings
        self._oracles: dict[str, SetRateOracle] = {}
        self._batch = 1

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        self._batch = batch
        self._oracles.clear()
        return super().prepare(items, temperature, batch, batches)

    def _drafter(self, arm: Variant) -> Drafter:
        vocab = self.llm.engine.runner.model.config.vocab
        oracle = SetRateOracle(self._texts, vocab, self._settings[arm.name], self._batch)
        self._oracles[arm.name] = oracle
        return oracle

    def take_drafts(self, arm: Variant) -> Counter[int]:
        if arm.name not in self._oracles:
            return Counter()
        oracle = self._oracles[arm.name]
        drafts, oracle.drafts = oracle.drafts, Counter()
        return drafts
