"""Benchmark backends that run batches on the engine in this process and time decoding alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from foretell.draft.base import Drafter
from foretell.errors import RequestError
from foretell.llm import LLM
from foretell.types import Request, SpeculationChoice

from .drafter_slots import DrafterSlot, DrafterSlots
from .engine_backend import NO_SPECULATION, EngineBackend, timed_generate
from .measure import PLAIN, Batch, BatchResult, MeasureJob, Variant, rephrase, variations, with_min_tokens
from .never_slower_grid import SYNTHETIC
from .prompt import BenchPrompt
from .settings import BenchSettings
from .synthetic import SyntheticCase
from .synthetic_drafters import SetRateOracle, synthetic_drafter


class EngineBatchBackend:
    """Variants take turns on one engine.

    Prompts are in the prefix cache before, and the clock starts when every sequence has its first token, so that only
    decoding is timed. A controller stays for the whole run, as in a server. Drafters are rebuilt each round, because
    one that remembers finished sequences would find in the second round what it saw in the first.
    """

    def __init__(self, llm: LLM, slots: DrafterSlots, settings: BenchSettings) -> None:
        self.llm, self._make, self._settings = llm, slots, settings
        self._single = EngineBackend(llm, slots)
        self._slots: dict[str, DrafterSlot] = {PLAIN.name: slots.make(PLAIN.speculation)}
        self._outputs: dict[tuple[int, ...], tuple[int, ...]] = {}  # plain outputs of the prepared batches, by prompt
        self._names = itertools.count()

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        """Return batches of distinct prompts and run them plain; prompts that do not fit the context are left out."""
        fitting = [item for item in items if self._single.fits(rephrase(item, 1), self._settings)]
        if not fitting:
            task = items[0].task if items else "the workload"
            raise RequestError("max_tokens", f"leaves no prompt of {task} that fits into this model's context")
        self._outputs.clear()
        distinct = [with_min_tokens(item, self._settings) for item in variations(fitting, batch * batches)]
        jobs = [job for item in distinct for job in self._single.prepare(item, temperature, self._settings)]
        found = [tuple(jobs[i : i + batch]) for i in range(0, len(jobs), batch)]
        for each in found:
            for job, output in zip(each, self.generate(PLAIN, each).outputs, strict=True):
                self._outputs[job.prompt] = output
        return found

    def reset(self, variants: Sequence[Variant]) -> None:
        """Rebuild the drafter of each variant and keep its controller."""
        for variant in variants:
            drafter = self._drafter(variant)
            slot = self._slots.get(variant.name)
            self._slots[variant.name] = (
                self._make.make(variant.speculation, drafter) if slot is None else slot.with_drafter(drafter)
            )

    def _drafter(self, variant: Variant) -> Drafter:
        if variant.speculation.drafter in SYNTHETIC:
            step_seconds = self.llm.assembly.profiler.controller.costs.seconds(1)
            vocab = self.llm.engine.runner.model.config.vocab
            return synthetic_drafter(variant.speculation.drafter, self._outputs, vocab, step_seconds)
        return self._make.drafter(variant.speculation)

    def generate(self, variant: Variant, batch: Batch) -> BatchResult:
        """Run a batch and time its decoding."""
        self._slots[variant.name].activate()
        stats = self.llm.engine.stats
        failures = stats.drafter_failures
        times = timed_generate(self.llm, [self._request(variant, job) for job in batch])
        return BatchResult(
            outputs=times.outputs,
            steps=times.steps,
            timed_tokens=times.timed_tokens,
            seconds=times.decode_seconds,
            drafter_failures=stats.drafter_failures - failures,
        )

    def _request(self, variant: Variant, job: MeasureJob) -> Request:
        choice = SpeculationChoice(prediction=job.prediction if variant.uses_prediction else None)
        choice = NO_SPECULATION if variant == PLAIN else choice
        (request,) = self.llm.assembly.requests.make(f"batch-{next(self._names)}", list(job.prompt), job.params, choice)
        return request


class SyntheticBackend(EngineBatchBackend):
    """A backend whose variants are synthetic cases, each with an oracle of its own."""

    def __init__(
        self, llm: LLM, slots: DrafterSlots, settings: BenchSettings, cases: Mapping[str, SyntheticCase]
    ) -> None:
        super().__init__(llm, slots, settings)
        self._cases = cases
        self._oracles: dict[str, SetRateOracle] = {}
        self._batch = 1

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        self._batch = batch
        self._oracles.clear()
        return super().prepare(items, temperature, batch, batches)

    def _drafter(self, variant: Variant) -> Drafter:
        vocab = self.llm.engine.runner.model.config.vocab
        oracle = SetRateOracle(self._outputs, vocab, self._cases[variant.name], self._batch)
        self._oracles[variant.name] = oracle
        return oracle

    def take_drafts(self, variant: Variant) -> Counter[int]:
        """Return and reset the counts of full-length drafts by accepted tokens."""
        if variant.name not in self._oracles:
            return Counter()
        oracle = self._oracles[variant.name]
        drafts, oracle.drafts = oracle.drafts, Counter()
        return drafts
