"""After a step for which memory did not suffice: smaller ones for a while, and nobody is lost."""

from __future__ import annotations

import logging
import traceback

import torch

from foretell.types import ScheduledSequence

from .scheduler import Scheduler

LOG = logging.getLogger("foretell")
PATIENCE = 64  # good steps after which twice as much is tried again


class OomBackoff:
    """Halves what a scheduler plans when a step runs out of memory, and doubles it again when steps go well."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.sheds = 0  # steps that ran out of memory
        self._limits = (scheduler.max_num_seqs, scheduler.max_step_tokens)
        self._good = 0

    def shed(self, plan: list[ScheduledSequence], error: Exception) -> None:
        """Plan at most half of what failed; a single row that failed is a failure like any other."""
        rows = sum(share.num_new_tokens + share.budget.nodes for share in plan)
        if rows <= 1:
            raise error
        self.sheds += 1
        self._good = 0
        scheduler = self.scheduler
        scheduler.max_step_tokens = max(1, rows // 2)
        scheduler.max_num_seqs = max(1, min(scheduler.max_num_seqs, scheduler.max_step_tokens))
        LOG.warning("out of memory in a step of %d tokens; %d at most for now", rows, scheduler.max_step_tokens)
        traceback.clear_frames(error.__traceback__)  # which hold on to what the step worked with
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        scheduler.preempt_excess()

    def went_well(self) -> None:
        """A step had memory enough."""
        scheduler, (seqs, tokens) = self.scheduler, self._limits
        if scheduler.max_step_tokens >= tokens and scheduler.max_num_seqs >= seqs:
            return
        self._good += 1
        if self._good == PATIENCE:
            self._good = 0
            scheduler.max_step_tokens = min(tokens, 2 * scheduler.max_step_tokens)
            scheduler.max_num_seqs = min(seqs, 2 * scheduler.max_num_seqs)
