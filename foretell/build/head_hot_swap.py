"""A better head for a running engine: read beside it, measured between two steps, taken only if it guesses better."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.wiring_check import OPENINGS, accuracy, write
from foretell.engine.engine import Engine
from foretell.errors import ForetellError, ModelError
from foretell.hub.checkpoint import CONFIG, WEIGHTS
from foretell.models.draft_heads import DraftHead, HeadConfig, TargetWeights
from foretell.models.draft_heads.loading import open_head, pack_head

Mark = tuple[float, int, float]  # when a folder's files were written, and how large they are
LONGEST = 256  # tokens of a beginning to measure with
LAST = 4  # of the texts that run now, whose beginnings are used


@dataclass(frozen=True)
class HeadCandidate:
    """A head that fits in the place of one that guesses now."""

    name: str  # of the drafter
    head: DraftHead[Any]


class HeadHotSwap:
    """Looks at a folder, and puts its head in the place of the served one of the same shape."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        if not any(isinstance(arm, HeadDrafter) for arm in engine.drafter.drafters.values()):
            raise ModelError("no head guesses here that another could replace; name one with --drafter")
        if engine.runner.model.shard is not None:
            raise ModelError("this target lies on several ranks, and a new head has to borrow from all of it")
        if not engine.runner.model.lends:
            raise ModelError("this target's output matrix is packed away, and a new head has to borrow from it")
        self.folder, self.engine = folder, engine
        self._seen = self.mark()
        self._postponed: HeadCandidate | None = None  # could not be measured yet

    def mark(self) -> Mark | None:
        """What tells one head in the folder from the next; None where there is none."""
        try:
            weights, config = (self.folder / WEIGHTS).stat(), (self.folder / CONFIG).stat()
        except OSError:
            return None
        return weights.st_mtime, weights.st_size, config.st_mtime

    def read(self) -> HeadCandidate | None:
        """Return the folder's head if it is new or still to be measured, ready to draft; not in the engine's thread."""
        mark = self.mark()
        if mark is None or mark == self._seen:
            return self._postponed
        self._seen, self._postponed = mark, None
        runner = self.engine.runner
        opened = open_head(self.folder, runner.model.config)
        for name, arm in self.engine.drafter.drafters.items():
            if isinstance(arm, HeadDrafter) and _shape(arm.head.config) == _shape(opened.config):
                head = opened.load(TargetWeights.of(runner.model), runner.model.dtype, runner.context)
                pack_head(head, runner.model)
                return HeadCandidate(name, head)
        raise ModelError(f"{self.folder}: a head of another shape than the one that guesses now")

    @torch.inference_mode()
    def judge(self, candidate: HeadCandidate) -> str:
        """Replace the served head if this one is more accurate; return what was done, "" if that was reported before.

        Runs between two steps, in the engine's thread. Without sequences to measure with, or without pages for them,
        nothing is decided, and `read` returns the candidate again.
        """
        arm = self.engine.drafter.drafters[candidate.name]
        assert isinstance(arm, HeadDrafter), "a candidate fits a head's drafter"
        texts = write(self.engine.runner, self._beginnings())
        is_new = candidate is not self._postponed
        self._postponed = None if texts else candidate
        if not texts:
            return (
                f"{self.folder}: not measured yet for want of free KV pages or prompts; tried again" if is_new else ""
            )
        before, after = accuracy(arm.head, texts), accuracy(candidate.head, texts)
        figures = f"{after:.0%} of its first guesses are right, {before:.0%} of those served now"
        if after <= before:
            return f"{self.folder}: not taken: {figures}"
        arm.take(candidate.head)
        self.engine.scheduler.recompute_all()  # what pages keep was made by the other head
        return f"{self.folder}: taken for {candidate.name}: {figures}"

    def _beginnings(self) -> list[list[int]]:
        """Of the texts that run now, or of our own where none does."""
        most = min(LONGEST, self.engine.runner.context // 2)  # the other half is for what the target generates
        running = [seq.tokens[:most] for seq in self.engine.scheduler.running[-LAST:]]
        if running or self.engine.tokenizer is None:
            return running
        return [self.engine.tokenizer.encode(text) for text in OPENINGS]


def read_or_say(replacement: HeadHotSwap) -> HeadCandidate | str | None:
    """As `read`; a folder that cannot be read is told of, and looked at again when it changes."""
    try:
        return replacement.read()
    except (ForetellError, OSError, ValueError) as error:
        return str(error)


def _shape(config: HeadConfig) -> HeadConfig:
    """All of a config that decides which tensors a head has and what it keeps in pages."""
    return replace(config, accuracy=(), target="")
