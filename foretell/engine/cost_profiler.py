"""Measures the costs of target steps and drafts with dummy sequences: the most useful at start, the rest while idle."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from foretell.control.adaptive import AdaptiveController
from foretell.control.latency_model import TREE_SUFFIX
from foretell.runner.cuda.graphs import capture_now
from foretell.runner.cuda.warmup import DummySequences
from foretell.types import Budget, Draft, ScheduledSequence, Sequence

from .engine import Engine

LOG = logging.getLogger("foretell")

CONTEXT = 128  # cached tokens of a dummy sequence, if the model's context allows
LONG_CONTEXT = 1024  # cached tokens of a long one
ROUNDS = 3  # measurements of each size, after one warm-up
# Target steps to measure: sequences, and rows of each (1 + draft tokens).
STEP_SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (4, 1), (4, 4), (8, 1), (8, 4), (16, 1), (16, 4), (32, 1))
LONG_ROWS = (1, 8)  # rows of one sequence with a long context
DRAFT_SIZES = ((1, 1), (1, 4), (4, 2))  # chains to measure: sequences, and draft tokens of each
TREE_SIZES = ((16, 2), (32, 4))  # trees to measure: nodes and depth
MAX_FILE_BYTES = 1 << 20
START_SECONDS = 0.4  # of measurements before the first request, so that it has drafts that pay
START_ROWS = (1, 4, 8, 2, 16)  # rows of one sequence that are measured then, the most informative first
START_DRAFTS = (1, 4)  # draft tokens of a chain that are measured then


@dataclass(frozen=True)
class ProfileStep:
    """One measurement: a target step, or a draft if a drafter is named."""

    num_sequences: int
    rows: int
    cached: int
    drafter: str = ""
    is_warmup: bool = False  # not recorded
    depth: int = 0  # of a tree; 0: a chain


def read_costs(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]], bool]:
    """Return the saved costs of steps, of drafts by drafter, and whether they are all that are measured.

    Raise ValueError if the file is damaged.
    """
    if (size := file.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"it has {size} bytes")
    saved = json.loads(file.read_text())
    steps, drafts = (saved.get(name) if isinstance(saved, dict) else None for name in ("steps", "drafts"))
    if (
        not isinstance(steps, dict)
        or not isinstance(drafts, dict)
        or any(type(one) is not dict for one in drafts.values())
    ):
        raise ValueError("it has no costs of steps and drafts")
    return steps, drafts, saved.get("complete", True) is True


class CostProfiler:
    """Fills a controller's cost models with measurements of dummy sequences, and saves them to a file."""

    def __init__(self, engine: Engine, controller: AdaptiveController, file: Path | None = None) -> None:
        self.engine, self.controller, self.file = engine, controller, file
        self._dummies = DummySequences(engine.runner)
        self._steps = self._all_steps()
        self.is_complete = False  # all measurements were taken, now or before they were saved

    def run_at_start(self) -> None:
        """Take the measurements of a single sequence, as many as the time allows. The others follow while idle."""
        began, drafts = perf_counter(), [name for name, each in self.controller.traits.items() if not each.is_free]
        short = min(CONTEXT, self.engine.runner.context // 2)
        steps = [ProfileStep(1, rows, short) for rows in START_ROWS]
        steps[2:2] = [ProfileStep(1, tokens, short, name) for name in drafts for tokens in START_DRAFTS]
        for round_ in range(ROUNDS + 1):
            for step in steps:
                if perf_counter() - began > START_SECONDS and self.controller.costs.is_known:
                    return
                is_warmup = not round_ and step.rows == 1
                if is_warmup:
                    self._run_step(replace(step, is_warmup=True))
                self._run_step(step)
        self.save()

    def _all_steps(self, wanted: Container[str] | None = None) -> Iterator[ProfileStep]:
        """Yield the measurements, the most informative first; with `wanted`, only those of these drafters."""
        sizes = STEP_SIZES if wanted is None else ()
        short, long = (min(tokens, self.engine.runner.context // 2) for tokens in (CONTEXT, LONG_CONTEXT))
        paid = [name for name, traits in self.controller.traits.items() if not traits.is_free]
        drafters = [name for name in paid if wanted is None or name in wanted or name + TREE_SUFFIX in wanted]
        for round_ in range(ROUNDS + 1):
            is_warmup = round_ == 0
            yield from (ProfileStep(count, rows, short, is_warmup=is_warmup) for count, rows in sizes)
            yield from (ProfileStep(1, rows, long, is_warmup=is_warmup) for rows in LONG_ROWS if sizes)
            for drafter in drafters:
                for count, depth in DRAFT_SIZES:
                    yield ProfileStep(count, depth, short, drafter, is_warmup)
            for drafter in drafters:
                if self.controller.traits[drafter].makes_trees and self.controller.settings.max_tree_nodes:
                    for nodes, depth in TREE_SIZES:
                        yield ProfileStep(1, nodes, short, drafter, is_warmup, depth)
        self.is_complete = True
        self.save()

    def load(self) -> bool:
        """Load the costs of an earlier run; then only drafters that are missing in the file are measured."""
        if self.file is None or not self.file.exists():
            return False
        try:
            steps, drafts, complete = read_costs(self.file)
        except (OSError, ValueError, RecursionError) as error:
            LOG.info("%s cannot be used, so costs are measured again: %s", self.file.name, error)
            return False
        self.controller.costs.load(steps)
        for drafter, costs in self.controller.draft_costs.items():
            costs.load(drafts.get(drafter, {}))
        if not self.controller.costs.is_known:
            return False
        self.is_complete = complete
        if not complete:
            return True
        missing = {drafter for drafter, costs in self.controller.draft_costs.items() if not costs.dump()}
        self._steps = self._all_steps(missing)
        return True

    def run_one(self) -> bool:
        """Take one measurement, in about the time of a step; return False when all are done."""
        step = next(self._steps, None)
        if step is None:
            return False
        self._run_step(step)
        return True

    def _run_step(self, step: ProfileStep) -> None:
        with capture_now(), self._dummies.allocate(step.num_sequences, step.cached, extra_tokens=step.rows) as seqs:
            if seqs:
                try:
                    self._measure(step, seqs)
                finally:
                    self._forget(step.drafter, seqs)

    def run(self) -> None:
        """Take all measurements now, those that were taken before too."""
        self._steps = self._all_steps()
        while self.run_one():
            pass

    def _forget(self, drafter: str, seqs: list[Sequence]) -> None:
        """Remove the dummy sequences from the measured drafter; the others never saw them and must not learn them."""
        if drafter:
            for seq in seqs:
                self.engine.drafter.drafters[drafter].forget(seq)

    def _measure(self, step: ProfileStep, seqs: list[Sequence]) -> None:
        if step.drafter:
            self._measure_draft(step, seqs)
        else:
            self._measure_target(step, seqs)

    def _measure_draft(self, step: ProfileStep, seqs: list[Sequence]) -> None:
        budgets = [Budget(step.rows, step.drafter, max_depth=step.depth)] * len(seqs)
        self.engine.drafter.propose(seqs, budgets)  # prefills the sequences, which is not to be measured
        self._run_target(step, seqs)  # evicts the drafter's weights from the caches of a CPU, as every step does
        began = perf_counter()
        drafts = self.engine.drafter.propose(seqs, budgets)
        seconds, nodes = perf_counter() - began, sum(map(len, drafts))
        if not nodes or step.is_warmup:
            return
        depth = step.depth or step.rows
        if not self.controller.traits[step.drafter].single_graph:
            depth = max(max(draft.depths(), default=0) for draft in drafts)
        costs = self.controller.draft_latency.costs_of(step.drafter, step.depth > 0)
        costs.observe(depth, nodes, 0, seconds, self.controller.costs.seconds(1))

    def _measure_target(self, step: ProfileStep, seqs: list[Sequence]) -> None:
        seconds = self._run_target(step, seqs)
        if step.is_warmup:
            return
        context = step.cached * step.num_sequences
        self.controller.costs.observe(step.num_sequences * step.rows, context, seconds, context * (step.rows - 1))

    def _run_target(self, step: ProfileStep, seqs: list[Sequence]) -> float:
        """Run a target step, of one row per sequence if a drafter is measured, and return its seconds."""
        drafts = [Draft.chain([0] * (0 if step.drafter else step.rows - 1), "profile")] * len(seqs)
        began = perf_counter()
        output = self.engine.runner.forward([ScheduledSequence.of(seq, 1) for seq in seqs], drafts)
        if self.engine.runner.supports_async and output.argmax is not None:
            began = perf_counter()  # with async scheduling, host work before the launch is not part of a step
            output.argmax()
        else:
            output.logits.argmax(-1).tolist()  # waits for the device
        return perf_counter() - began

    def save(self) -> None:
        """Save the measured costs atomically."""
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False, suffix=".tmp") as temporary:
                drafts = {drafter: costs.dump() for drafter, costs in self.controller.draft_costs.items()}
                saved = {"steps": self.controller.costs.dump(), "drafts": drafts, "complete": self.is_complete}
                json.dump(saved, temporary)
            os.replace(temporary.name, self.file)
        except OSError as error:  # a full or read-only disk costs the next start a few seconds
            LOG.info("measured costs are not saved: %s", error)
