"""Measures what steps and drafts cost here, a piece at a time, while nobody waits."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from foretell.control.adaptive import AdaptiveController
from foretell.control.draft_latency import TREE_SUFFIX as OF_TREES
from foretell.runner.cuda.graphs import freely
from foretell.runner.dummy_sequences import DummySequences
from foretell.types import Budget, Draft, ScheduledSequence, Sequence

from .engine import Engine

LOG = logging.getLogger("foretell")

CACHED = 128  # tokens of each made-up text, where the model takes as many
ROUNDS = 3
TEXTS_AND_ROWS = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (4, 1), (4, 4), (8, 1), (8, 4), (16, 1), (16, 4), (32, 1))
LONG, ROWS_OF_LONG = 1024, (1, 8)  # tokens of a long text, where the model takes as many
TEXTS_AND_DEPTHS = ((1, 1), (1, 4), (4, 2))
TREES = ((16, 2), (32, 4))  # nodes and levels
MOST_BYTES = 1 << 20  # of a file of costs


@dataclass(frozen=True)
class ProfileStep:
    """One measurement: a step of the target, or with an arm named a draft. One that warms up is not counted."""

    texts: int
    rows: int
    cached: int
    arm: str = ""
    warms_up: bool = False
    levels: int = 0  # of a tree


def read_costs(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what an earlier run wrote of steps, and of drafts by drafter; ValueError where the file is damaged."""
    if (size := file.stat().st_size) > MOST_BYTES:
        raise ValueError(f"it has {size} bytes")
    kept = json.loads(file.read_text())
    steps, drafts = (kept.get(name) if isinstance(kept, dict) else None for name in ("steps", "drafts"))
    if (
        not isinstance(steps, dict)
        or not isinstance(drafts, dict)
        or any(type(one) is not dict for one in drafts.values())
    ):
        raise ValueError("it has no costs of steps and drafts")
    return steps, drafts


class CostProfiler:
    """Feeds a controller's cost curves with made-up texts, and keeps what was learnt in a file."""

    def __init__(self, engine: Engine, controller: AdaptiveController, file: Path | None = None) -> None:
        self.engine, self.controller, self.file = engine, controller, file
        self._made_up = DummySequences(engine.runner)
        self._left = self._pieces()

    def _pieces(self, wanted: Container[str] | None = None) -> Iterator[ProfileStep]:
        """The small ones first: they tell most."""
        steps = TEXTS_AND_ROWS if wanted is None else ()
        short, long = (min(tokens, self.engine.runner.context // 2) for tokens in (CACHED, LONG))
        paid = [name for name, traits in self.controller.traits.items() if not traits.free]
        arms = [name for name in paid if wanted is None or name in wanted or name + OF_TREES in wanted]
        for turn in range(ROUNDS + 1):
            yield from (ProfileStep(texts, rows, short, warms_up=not turn) for texts, rows in steps)
            yield from (ProfileStep(1, rows, long, warms_up=not turn) for rows in ROWS_OF_LONG if steps)
            yield from (
                ProfileStep(texts, depth, short, arm, not turn) for arm in arms for texts, depth in TEXTS_AND_DEPTHS
            )
            grow = [
                arm for arm in arms if self.controller.traits[arm].grows and self.controller.settings.max_tree_nodes
            ]
            yield from (ProfileStep(1, nodes, short, arm, not turn, levels) for arm in grow for nodes, levels in TREES)
        self.save()

    def load(self) -> bool:
        """Take up what an earlier run measured; then there is nothing left to do."""
        if self.file is None or not self.file.exists():
            return False
        try:
            steps, drafts = read_costs(self.file)
        except (OSError, ValueError, RecursionError) as error:
            LOG.info("%s cannot be used, so costs are measured again: %s", self.file.name, error)
            return False
        self.controller.costs.load(steps)
        for arm, costs in self.controller.draft_costs.items():
            costs.load(drafts.get(arm, {}))
        if not self.controller.costs.is_known:
            return False
        missing = {arm for arm, costs in self.controller.draft_costs.items() if not costs.dump()}
        self._left = self._pieces(missing)
        return True

    def piece(self) -> bool:
        """Measure one thing, in about the time of a step; False when all is known."""
        found = next(self._left, None)
        if found is None:
            return False
        with freely(), self._made_up.texts(found.texts, found.cached, room=found.rows) as seqs:
            if seqs:
                try:
                    self._measure(found, seqs)
                finally:
                    self._forget(found.arm, seqs)
        return True

    def _forget(self, arm: str, seqs: list[Sequence]) -> None:
        """Only the drafter that was measured has met them; others must not take them for texts to learn from."""
        if arm:
            for seq in seqs:
                self.engine.drafter.drafters[arm].forget(seq)

    def run(self) -> None:
        """Measure all of it, anew."""
        self._left = self._pieces()
        while self.piece():
            pass

    def _measure(self, piece: ProfileStep, seqs: list[Sequence]) -> None:
        if piece.arm:
            budgets = [Budget(piece.rows, piece.arm, max_depth=piece.levels)] * len(seqs)
            self.engine.drafter.propose(seqs, budgets)  # reads the texts, and is not what is to be measured
            began = perf_counter()
            drafts = self.engine.drafter.propose(seqs, budgets)
            seconds, nodes = perf_counter() - began, sum(map(len, drafts))
            if nodes and not piece.warms_up:
                costs = self.controller.draft_latency.costs_of(piece.arm, piece.levels > 0)
                depth = piece.levels or piece.rows
                if not self.controller.traits[piece.arm].whole:
                    depth = max(max(draft.depths(), default=0) for draft in drafts)
                costs.observe(depth, nodes, 0, seconds, self.controller.costs.seconds(1))
            return
        drafts = [Draft.chain([0] * (piece.rows - 1), "profile")] * len(seqs)
        began = perf_counter()
        output = self.engine.runner.forward([ScheduledSequence.of(seq, 1) for seq in seqs], drafts)
        if self.engine.runner.supports_async and output.argmax is not None:
            began = perf_counter()  # what the host did before is no part of a step there, as while texts are written
            output.argmax()
        else:
            output.logits.argmax(-1).tolist()  # a device is done when its answer is here
        if piece.warms_up:
            return
        context = piece.cached * piece.texts
        seconds = perf_counter() - began
        self.controller.costs.observe(piece.texts * piece.rows, context, seconds, context * (piece.rows - 1))

    def save(self) -> None:
        """Keep what was learnt, whole or not at all."""
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False, suffix=".tmp") as temporary:
                drafts = {arm: costs.dump() for arm, costs in self.controller.draft_costs.items()}
                json.dump({"steps": self.controller.costs.dump(), "drafts": drafts}, temporary)
            os.replace(temporary.name, self.file)
        except OSError as error:  # a full or read-only disk costs the next start a few seconds
            LOG.info("measured costs are not kept: %s", error)
