"""Who runs in the next step, with how many tokens, on which pages."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from dataclasses import replace

import torch

from foretell.kv.prefix import PrefixIndex
from foretell.kv.swap import Swap
from foretell.runner.model_runner import ModelRunner
from foretell.types import Budget, ScheduledSequence, Sequence

ROWS_WITH_LOGITS = 256  # the most rows of a prompt that keep their logits, a vocabulary wide, in one step


class Scheduler:
    """Texts being written come first, then prompts, in chunks; the oldest before the younger.

    Where tokens or pages run short, drafts shrink first, then prompts wait, then the youngest gives its pages back.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prefix: PrefixIndex | None,
        max_num_seqs: int,
        max_step_tokens: int,
        swap: Swap | None = None,
    ) -> None:
        self.runner, self.prefix, self.swap = runner, prefix, swap
        self.max_num_seqs, self.max_step_tokens = max_num_seqs, max_step_tokens
        self.running: list[Sequence] = []  # oldest first
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._refused: int | None = None  # pages there were when the first who waits could not come in for want of them

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits who might come in, as far as pages go."""
        return bool(self.waiting) and (self._refused is None or self.runner.pool.available > self._refused)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """`seq` has ended: its pages go back."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
            self._refused = None  # it may be the one that did not fit
        if self.swap is not None:
            self.swap.forget(seq)
        self._give_back(seq)

    def observe(self, plan: list[ScheduledSequence], seconds: float) -> None:
        """What a step took: whether a text is read again or copied hangs on it."""
        if self.swap is not None:
            self.swap.observe(sum(share.num_new_tokens for share in plan), seconds)

    def schedule(self, budgets: list[Budget]) -> list[ScheduledSequence]:
        """The next step; `budgets` are for `running` as it stands. Pages are reserved for all of it."""
        wishes = {seq.id: budget for seq, budget in zip(self.running, budgets, strict=True)}
        before = self.preemptions
        writing = [seq for seq in self.running if seq.pending == 1]
        size = self.runner.pool.page_size
        for seq in writing:
            if seq.cached >= size * len(seq.pages) and seq in self.running:
                self._secure(seq, seq.cached + 1)
        if self.preemptions != before:
            writing = [seq for seq in writing if seq in self.running]
        reading = [] if len(writing) == len(self.running) else [seq for seq in self.running if seq.pending > 1]
        left = max(0, self.max_step_tokens - len(writing))
        shares = self._plan_writing(writing, wishes, left // 2 if reading or self.waiting else left)
        if reading:
            shares += self._plan_reading(reading, self._left(shares), alone=not shares)
        if self.waiting and self.preemptions == before:  # who has just had to leave does not come back at once
            shares += self._admit(self._left(shares), alone=not shares)
        return shares

    def _left(self, shares: list[ScheduledSequence]) -> int:
        return self.max_step_tokens - sum(share.num_new_tokens + share.budget.nodes for share in shares)

    def _plan_writing(self, writing: list[Sequence], wishes: dict[int, Budget], left: int) -> list[ScheduledSequence]:
        shares = []
        context, size = self.runner.context, self.runner.pool.page_size
        for seq in writing:
            wish, behind = wishes[seq.id], seq.cached + 1
            nodes = min(wish.nodes, left, max(0, context - behind)) if wish.nodes else 0
            if behind + nodes > len(seq.pages) * size:
                nodes = min(nodes, (len(seq.pages) + self.runner.pool.available) * size - behind)
                reserved = self.runner.reserve(seq, behind + nodes)
                assert reserved, "a draft asks for no more pages than there are"
            left -= nodes
            shares.append(ScheduledSequence.of(seq, 1, wish if nodes == wish.nodes else replace(wish, nodes=nodes)))
        return shares

    def _plan_reading(self, reading: list[Sequence], left: int, alone: bool) -> list[ScheduledSequence]:
        shares: list[ScheduledSequence] = []
        for seq in reading:
            if left <= 0:
                break
            if alone and not shares:  # somebody must go on, or nobody ever would
                self._secure(seq, seq.cached + 1)
            if seq in self.running and (take := self._chunk(seq, left)) > 0:
                shares.append(ScheduledSequence.of(seq, take))
                left -= take
        return shares

    def _chunk(self, seq: Sequence, left: int) -> int:
        """Reserve pages for as many pending tokens as there are and fit."""
        fit = (len(seq.pages) + self.runner.pool.available) * self.runner.pool.page_size - seq.cached
        most = left if seq.request.params.prompt_logprobs is None else min(left, ROWS_WITH_LOGITS)
        take = min(seq.pending, most, fit)
        return take if take > 0 and self.runner.reserve(seq, seq.cached + take) else 0

    def _admit(self, left: int, alone: bool) -> list[ScheduledSequence]:
        shares: list[ScheduledSequence] = []
        self._refused = None
        for seq in list(self.waiting):
            if left <= 0 or len(self.running) >= self.max_num_seqs:
                break
            if self._leader_reads(seq):
                continue  # it comes a step later, to those pages
            if not self._enter(seq, force=alone and not shares):
                self._refused = self.runner.pool.available
                break
            take = self._chunk(seq, left)
            assert take > 0, "a sequence enters only where it can go on"
            shares.append(ScheduledSequence.of(seq, take))
            left -= take
        return shares

    def _leader_reads(self, seq: Sequence) -> bool:
        """Whether a running text is about to fill a page that this one could share."""
        if self.prefix is None or seq.request.params.prompt_logprobs is not None:
            return False
        return any(self._reads_for(leader, seq) for leader in self.running)

    def _reads_for(self, leader: Sequence, seq: Sequence) -> bool:
        """Whether the next page `leader` fills is one of the beginning of `seq`, whose last token is never shared."""
        size = self.runner.pool.page_size
        end = (leader.cached // size + 1) * size
        return (
            leader.pending > 1
            and end <= len(leader.tokens)
            and end < len(seq.tokens)
            and leader.request.tenant == seq.request.tenant
            and leader.tokens[end - 1] == seq.tokens[end - 1]  # most differ here, and long texts are not copied
            and leader.tokens[:end] == seq.tokens[:end]
        )

    def _enter(self, seq: Sequence, force: bool) -> bool:
        """Move `seq` from waiting to running if its pages fit, cached beginnings counted; `force`: if any do."""
        if self.prefix is not None and seq.request.params.prompt_logprobs is None:
            seq.pages = self.prefix.match(seq.tokens, seq.request.tenant)
            seq.cached, seq.published = len(seq.pages) * self.runner.pool.page_size, len(seq.pages)
        need = 1 if force else self.runner.pool.pages_for(len(seq.tokens) + 1) - len(seq.pages)
        if need > self.runner.pool.available:
            self._give_back(seq)
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        if self.swap is not None:
            self._bring_back(seq, self.swap)
        return True

    def _bring_back(self, seq: Sequence, swap: Swap) -> None:
        """Copy KV from the host if it has more than the prefix cache and the pages fit; free the stash."""
        if swap.tokens(seq) > seq.cached and self.runner.reserve(seq, swap.tokens(seq)):
            swap.bring_back(seq)
        else:
            swap.forget(seq)

    def _secure(self, seq: Sequence, tokens: int) -> bool:
        """Reserve pages for `tokens`, taken from the youngest if need be; False if that is `seq` itself."""
        while not self.runner.reserve(seq, tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """Free the pages of `seq` and queue it first; it resumes with the same tokens."""
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.preemptions += 1
        try:
            if self.swap is not None:
                self.swap.keep(seq)
        finally:
            self._give_back(seq)

    def preempt_excess(self) -> None:
        """Preempt the youngest sequences until no more run than `max_num_seqs`."""
        while len(self.running) > self.max_num_seqs:
            self.preempt(self.running[-1])

    def recompute_all(self) -> None:
        """Take everybody off their pages, and forget what pages hold: something else is to be kept in them."""
        for seq in self.running[::-1]:
            self.preempt(seq)
        if self.swap is not None:
            for seq in self.waiting:
                self.swap.forget(seq)
        if self.prefix is not None:
            self.prefix.clear()

    def release_unused(self, seq: Sequence) -> None:
        """After a step: offer full pages to others and take back those the draft no longer needs."""
        self.runner.trim(seq, len(seq.tokens))
        full = seq.cached // self.runner.pool.page_size
        if self.prefix is not None and full > seq.published:
            tokens, tenant = seq.tokens, seq.request.tenant
            seq.published = self.prefix.publish(tokens, seq.pages[:full], tenant, seq.published)

    def _give_back(self, seq: Sequence) -> None:
        self.runner.pool.release(seq.pages)
        seq.pages, seq.cached, seq.published = [], 0, 0


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
