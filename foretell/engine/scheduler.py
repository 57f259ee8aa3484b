"""Continuous batching: which sequences run in the next step, with how many tokens, on which KV pages."""

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

LOG = logging.getLogger("foretell")
MAX_PROMPT_LOGIT_ROWS = 256  # prompt tokens per step that keep their logits (prompt_logprobs); a row is [vocab]
STEPS_TO_RESTORE = 64  # steps without an OOM before the limits are doubled again


class Scheduler:
    """Schedules decoding sequences first, then prefill in chunks, then admissions; older sequences first.

    If tokens or pages run short, drafts shrink first, then prefill waits, then the youngest sequence is preempted.
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
        self.preemptions = 0  # since the start
        self._pages_at_refusal: int | None = None  # free pages when the first waiting sequence last did not fit

    @property
    def may_admit(self) -> bool:
        """Return whether a sequence waits and the pages may suffice for it."""
        if not self.waiting:
            return False
        return self._pages_at_refusal is None or self.runner.pool.num_available > self._pages_at_refusal

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a finished sequence and free its pages."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
            self._pages_at_refusal = None  # it may be the one that did not fit
        if self.swap is not None:
            self.swap.forget(seq)
        self._free_pages(seq)

    def observe(self, scheduled: list[ScheduledSequence], seconds: float) -> None:
        """Record the time of a step, which decides between swapping and recomputing preempted sequences."""
        if self.swap is not None:
            self.swap.observe(sum(each.num_new_tokens for each in scheduled), seconds)

    def schedule(self, budgets: list[Budget]) -> list[ScheduledSequence]:
        """Schedule the next step and reserve its pages. `budgets` are the draft budgets of `running`, in order."""
        budget_by_id = {seq.id: budget for seq, budget in zip(self.running, budgets, strict=True)}
        preemptions = self.preemptions
        page_size = self.runner.pool.page_size
        decoding = [seq for seq in self.running if seq.pending == 1]
        for seq in decoding:
            if seq.num_computed_tokens >= page_size * len(seq.pages) and seq in self.running:
                self._reserve_or_preempt(seq, seq.num_computed_tokens + 1)
        if self.preemptions != preemptions:
            decoding = [seq for seq in decoding if seq in self.running]
        prefilling: list[Sequence] = []
        if len(decoding) != len(self.running):
            prefilling = [seq for seq in self.running if seq.pending > 1]
        draft_tokens = max(0, self.max_step_tokens - len(decoding))
        if prefilling or self.waiting:
            draft_tokens //= 2  # the other half is for prefill
        scheduled = self._schedule_decode(decoding, budget_by_id, draft_tokens)
        if prefilling:
            scheduled += self._schedule_prefill(prefilling, self._tokens_left(scheduled), must_progress=not scheduled)
        if self.waiting and self.preemptions == preemptions:  # a sequence just preempted is not admitted at once
            scheduled += self._admit(self._tokens_left(scheduled), must_progress=not scheduled)
        return scheduled

    def _tokens_left(self, scheduled: list[ScheduledSequence]) -> int:
        return self.max_step_tokens - sum(each.num_new_tokens + each.budget.nodes for each in scheduled)

    def _schedule_decode(
        self, decoding: list[Sequence], budgets: dict[int, Budget], draft_tokens: int
    ) -> list[ScheduledSequence]:
        """Schedule one token of each sequence, with drafts as far as step tokens, context and free pages allow."""
        scheduled = []
        context, page_size = self.runner.context, self.runner.pool.page_size
        for seq in decoding:
            budget, end = budgets[seq.id], seq.num_computed_tokens + 1
            nodes = min(budget.nodes, draft_tokens, max(0, context - end)) if budget.nodes else 0
            if end + nodes > len(seq.pages) * page_size:
                nodes = min(nodes, (len(seq.pages) + self.runner.pool.num_available) * page_size - end)
                reserved = self.runner.reserve(seq, end + nodes)
                assert reserved, "a draft asks for no more pages than are free"
            draft_tokens -= nodes
            if nodes != budget.nodes:
                budget = replace(budget, nodes=nodes)
            scheduled.append(ScheduledSequence.of(seq, 1, budget))
        return scheduled

    def _schedule_prefill(
        self, prefilling: list[Sequence], tokens_left: int, must_progress: bool
    ) -> list[ScheduledSequence]:
        """Schedule the next prefill chunk of each sequence; `must_progress`: preempt if none would fit."""
        scheduled: list[ScheduledSequence] = []
        for seq in prefilling:
            if tokens_left <= 0:
                break
            if must_progress and not scheduled:
                self._reserve_or_preempt(seq, seq.num_computed_tokens + 1)
            if seq in self.running and (num_tokens := self._reserve_chunk(seq, tokens_left)) > 0:
                scheduled.append(ScheduledSequence.of(seq, num_tokens))
                tokens_left -= num_tokens
        return scheduled

    def _reserve_chunk(self, seq: Sequence, tokens_left: int) -> int:
        """Reserve pages for as many pending tokens as fit, and return their number."""
        pool = self.runner.pool
        free_slots = (len(seq.pages) + pool.num_available) * pool.page_size - seq.num_computed_tokens
        if seq.request.params.prompt_logprobs is not None:
            tokens_left = min(tokens_left, MAX_PROMPT_LOGIT_ROWS)
        num_tokens = min(seq.pending, tokens_left, free_slots)
        return num_tokens if num_tokens > 0 and self.runner.reserve(seq, seq.num_computed_tokens + num_tokens) else 0

    def _admit(self, tokens_left: int, must_progress: bool) -> list[ScheduledSequence]:
        """Admit waiting sequences in order, each with its first prefill chunk, until one does not fit."""
        scheduled: list[ScheduledSequence] = []
        self._pages_at_refusal = None
        for seq in list(self.waiting):
            if tokens_left <= 0 or len(self.running) >= self.max_num_seqs:
                break
            if self._prefix_is_being_prefilled(seq):
                continue  # a step later it finds those pages in the prefix cache
            if not self._try_admit(seq, force=must_progress and not scheduled):
                self._pages_at_refusal = self.runner.pool.num_available
                break
            num_tokens = self._reserve_chunk(seq, tokens_left)
            assert num_tokens > 0, "a sequence is admitted only if it can run"
            scheduled.append(ScheduledSequence.of(seq, num_tokens))
            tokens_left -= num_tokens
        return scheduled

    def _prefix_is_being_prefilled(self, seq: Sequence) -> bool:
        """Return whether a running sequence is about to fill a page that `seq` could share."""
        if self.prefix is None or seq.request.params.prompt_logprobs is not None:
            return False
        return any(self._fills_page_of(leader, seq) for leader in self.running)

    def _fills_page_of(self, leader: Sequence, seq: Sequence) -> bool:
        """Return whether the next page `leader` fills is a prefix of `seq`; the last token of `seq` is never shared."""
        page_size = self.runner.pool.page_size
        end = (leader.num_computed_tokens // page_size + 1) * page_size
        return (
            leader.pending > 1
            and end <= len(leader.tokens)
            and end < len(seq.tokens)
            and leader.request.tenant == seq.request.tenant
            and leader.tokens[end - 1] == seq.tokens[end - 1]  # most differ here, which saves copying long prefixes
            and leader.tokens[:end] == seq.tokens[:end]
        )

    def _try_admit(self, seq: Sequence, force: bool) -> bool:
        """Move `seq` from waiting to running if its pages fit, minus its cached prefix; `force`: if one page does."""
        if self.prefix is not None and seq.request.params.prompt_logprobs is None:
            seq.pages = self.prefix.match(seq.tokens, seq.request.tenant)
            seq.published = len(seq.pages)
            seq.num_computed_tokens = len(seq.pages) * self.runner.pool.page_size
        needed = 1 if force else self.runner.pool.pages_for(len(seq.tokens) + 1) - len(seq.pages)
        if needed > self.runner.pool.num_available:
            self._free_pages(seq)
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        if self.swap is not None:
            self._swap_in(seq, self.swap)
        return True

    def _swap_in(self, seq: Sequence, swap: Swap) -> None:
        """Copy KV from the host if it has more than the prefix cache and the pages fit; drop the host copy."""
        if swap.num_tokens(seq) > seq.num_computed_tokens and self.runner.reserve(seq, swap.num_tokens(seq)):
            swap.swap_in(seq)
        else:
            swap.forget(seq)

    def _reserve_or_preempt(self, seq: Sequence, num_tokens: int) -> bool:
        """Reserve pages for `num_tokens`, preempting the youngest as needed; False if `seq` itself was preempted."""
        while not self.runner.reserve(seq, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """Preempt a running sequence: free its KV pages and put it at the head of the waiting queue.

        It keeps its tokens. When it is admitted again, its KV is recomputed from them (prefill), or copied back from
        the host if it was swapped out here, which `Swap` does where copying is faster.
        """
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.preemptions += 1
        try:
            if self.swap is not None:
                self.swap.swap_out(seq)
        finally:
            self._free_pages(seq)

    def preempt_excess(self) -> None:
        """Preempt the youngest sequences until no more run than `max_num_seqs`."""
        while len(self.running) > self.max_num_seqs:
            self.preempt(self.running[-1])

    def recompute_all(self) -> None:
        """Preempt every sequence and drop all cached KV, because pages will hold something else from now on."""
        for seq in self.running[::-1]:
            self.preempt(seq)
        if self.swap is not None:
            for seq in self.waiting:
                self.swap.forget(seq)
        if self.prefix is not None:
            self.prefix.clear()

    def release_unused(self, seq: Sequence) -> None:
        """After a step: free the pages of rejected draft tokens and publish full pages to the prefix cache."""
        self.runner.trim(seq, len(seq.tokens))
        full = seq.num_computed_tokens // self.runner.pool.page_size
        if self.prefix is not None and full > seq.published:
            tokens, tenant = seq.tokens, seq.request.tenant
            seq.published = self.prefix.insert(tokens, seq.pages[:full], tenant, seq.published)

    def _free_pages(self, seq: Sequence) -> None:
        self.runner.pool.release(seq.pages)
        seq.pages = []
        seq.num_computed_tokens = 0
        seq.published = 0


class OomBackoff:
    """Halves the scheduler's limits when a step runs out of memory, and doubles them again after successful steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.num_ooms = 0  # steps that ran out of memory
        self._limits = (scheduler.max_num_seqs, scheduler.max_step_tokens)
        self._successes = 0  # steps since the limits last changed

    def reduce(self, scheduled: list[ScheduledSequence], error: Exception) -> None:
        """Limit steps to half the rows of the one that failed; raise `error` if that was a single row."""
        rows = sum(each.num_new_tokens + each.budget.nodes for each in scheduled)
        if rows <= 1:
            raise error
        self.num_ooms += 1
        self._successes = 0
        scheduler = self.scheduler
        scheduler.max_step_tokens = max(1, rows // 2)
        scheduler.max_num_seqs = max(1, min(scheduler.max_num_seqs, scheduler.max_step_tokens))
        LOG.warning("out of memory in a step of %d tokens; steps are limited to %d", rows, scheduler.max_step_tokens)
        traceback.clear_frames(error.__traceback__)  # they hold references to the step's tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        scheduler.preempt_excess()

    def record_success(self) -> None:
        """Count a step that had enough memory, and raise lowered limits after enough of them."""
        scheduler, (max_num_seqs, max_step_tokens) = self.scheduler, self._limits
        if scheduler.max_step_tokens >= max_step_tokens and scheduler.max_num_seqs >= max_num_seqs:
            return
        self._successes += 1
        if self._successes == STEPS_TO_RESTORE:
            self._successes = 0
            scheduler.max_step_tokens = min(max_step_tokens, 2 * scheduler.max_step_tokens)
            scheduler.max_num_seqs = min(max_num_seqs, 2 * scheduler.max_num_seqs)
