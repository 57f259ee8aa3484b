"""The engine loop: schedule, draft, forward, verify, commit, observe.

`Engine.step` is the page to read first. Launching a step before the previous one has finished is described and
implemented in `async_scheduling.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from time import perf_counter

from foretell.control.controller import Controller
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.errors import CapacityError, is_oom
from foretell.runner.cuda.graphs import TimingGuard
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.grammar import Grammar
from foretell.sampling.grammar_matcher import GrammarError
from foretell.tokenizer import Tokenizer
from foretell.types import Budget, Delta, Draft, Request, ScheduledSequence, Sequence, StepResult, StepTimes

from .async_scheduling import AsyncScheduler, InFlightStep, can_draft_on_device
from .detokenizer import Detokenizer
from .draft_guard import SafeDrafter, apply_grammar
from .rule_verifier import RuleVerifier
from .scheduler import OomBackoff, Scheduler
from .sequence_state import PendingDelta, SequenceState, flush
from .stats import SpeculationStats, Stats
from .verifier import Verifier


class Engine:
    """Generates the sequences of many requests together, one step at a time."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        controller: Controller,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None = None,
        rule_verifier: RuleVerifier | None = None,
    ) -> None:
        vocab = runner.model.config.vocab
        self.runner = runner
        self.controller = controller
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.states: dict[int, SequenceState] = {}  # by sequence id, until the sequence has finished
        self.stats = Stats()
        self.safe_drafter = SafeDrafter(drafter, vocab)
        self.verifier = Verifier(
            self.states,
            drafter=self.safe_drafter,
            learns_from=lambda seq: self.controller.learns_from(seq),  # the controller can be replaced
            vocab=vocab,
            rule_verifier=rule_verifier or RuleVerifier(),
        )
        self.async_scheduler = AsyncScheduler(runner, scheduler)
        self.oom_backoff = OomBackoff(scheduler)
        self._ids = itertools.count()

    def step(self) -> list[Delta]:
        """Run one step and return what it added to each sequence.

        Plain decoding is the same step with empty drafts. With async scheduling, `take` returns a step that was
        launched during the previous one, and `overlap` and `launch_next` launch the next one early; on a device without
        async scheduling the three do nothing.
        """
        async_scheduler = self.async_scheduler
        with async_scheduler, TimingGuard() as guard:
            step = async_scheduler.take(self.verifier) or self.schedule()
            if step is None:
                return []
            try:
                if not step.is_launched:
                    self.draft(step)
                    self.forward(step)
                async_scheduler.overlap(step, self.controller, self.verifier)
                results = self.verifier.verify(step)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                self._back_off(step, error)
                return []
            if self.runner.workers is not None:
                self.runner.workers.check()
            step.is_outlier |= guard.is_outlier
            pending: list[PendingDelta] = []
            deltas: list[Delta] = []
            try:
                results = [self.commit(result, pending) for result in results]
                if not self.runner.supports_async:
                    deltas = flush(pending)
                times = async_scheduler.step_times(step)
                self.observe(results, times)
                if self.states and self.controller.allows_early_start:
                    async_scheduler.launch_next(step, self._launch)
            finally:  # with async scheduling, deltas are emitted while the device runs the next step
                deltas += flush(pending)
            self.stats.observe(results, times)
            return deltas

    def schedule(self) -> InFlightStep | None:
        """Choose draft lengths and schedule the next step; None if nothing can run.

        The controller sees free drafts (n-gram, suffix) of the sequences it polls before it decides.
        """
        began_at = perf_counter()
        running = self.scheduler.running
        polled, max_nodes = self.controller.wants_free_drafts(running)
        free_drafts = self.safe_drafter.free_drafts(polled, max_nodes)
        scheduled = self.scheduler.schedule(self.controller.choose_draft_lengths(running, free_drafts))
        if not scheduled:
            return None
        self._record_starts(scheduled)
        return InFlightStep(scheduled, began_at)

    def draft(self, step: InFlightStep) -> None:
        """Let the drafters propose draft tokens; drop those that do not pay or that a grammar forbids."""
        began_at = perf_counter()
        proposed = self.safe_drafter.propose(step.scheduled, self._draft_budgets(step.scheduled))
        step.propose_seconds = perf_counter() - began_at
        trimmed = self.controller.trim(step.scheduled, proposed)
        step.drafts = [self._apply_grammar(*pair) for pair in zip(step.scheduled, trimmed, strict=True)]
        step.drafted_at = perf_counter()

    def forward(self, step: InFlightStep) -> None:
        """Launch the target's forward pass over the new tokens and drafts of a step."""
        step.output = self.runner.forward(step.scheduled, step.drafts)
        # Without `argmax` the step is several passes, and the first ones run while the host launches the others.
        step.launched_at = step.drafted_at if step.output.argmax is None else perf_counter()
        step.is_launched = True
        self.async_scheduler.stamp(step)

    def commit(self, result: StepResult, pending: list[PendingDelta]) -> StepResult:
        """Append the accepted draft tokens and the target's next token to a sequence, and queue its delta.

        This is the only place where a sequence grows. Return the result with the tokens that were appended.
        """
        scheduled, verified = result.scheduled, result.verify_result
        seq = scheduled.seq
        if verified is None:  # a prefill chunk that does not reach the end of the prompt
            seq.num_computed_tokens += scheduled.num_new_tokens
            return result
        # The KV of an accepted path through a tree is moved to consecutive slots after the last token's.
        self.runner.compact_kv(seq, scheduled.length - 1, verified.accepted_path)
        state, draft = self.states[seq.id], result.draft
        new_tokens = state.append([*(draft.tokens[node] for node in verified.accepted_path), verified.next_token])
        seq.tokens += new_tokens
        # KV past `num_computed_tokens` belongs to rejected draft tokens; the next step overwrites it, so rollback is
        # this one assignment. The last token has no KV yet: the next step runs it.
        seq.num_computed_tokens = min(scheduled.length + len(verified.accepted_path), len(seq.tokens) - 1)
        result = result.with_new_tokens(new_tokens)
        state.has_pending_delta = True
        pending.append(PendingDelta(state, result, "" if len(draft) else self.controller.skip_reason(seq)))
        return result

    def observe(self, results: list[StepResult], times: StepTimes) -> None:
        """Let scheduler, drafter and controller learn from a step, then free what its sequences no longer need."""
        if not times.is_outlier:
            self.scheduler.observe([result.scheduled for result in results], times.target_seconds)
        self.oom_backoff.record_success()
        try:
            self.safe_drafter.update_kv(results)
            self.safe_drafter.observe([r for r in results if self.controller.learns_from(r.scheduled.seq)])
            self.stats.drafter_failures = self.safe_drafter.failures
            self.controller.observe(results, times)
        finally:  # only now: drafters may read the hidden states or KV of these pages
            for result in results:
                self.release(result.scheduled.seq)

    def _launch(self) -> InFlightStep | None:
        """Schedule, draft and launch a step; None if nothing can run or memory ran out."""
        step = self.schedule()
        if step is None:
            return None
        try:
            self.draft(step)
            self.forward(step)
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            self._back_off(step, error)
            return None
        return step

    def _back_off(self, step: InFlightStep, error: Exception) -> None:
        """Retry the sequences of a step that ran out of memory in smaller steps; none of them has changed."""
        self.async_scheduler.discard()
        current = [scheduled for scheduled in step.scheduled if self.verifier.is_current(scheduled)]
        self.oom_backoff.reduce(current, error)
        for scheduled in current:
            self.scheduler.release_unused(scheduled.seq)

    def _draft_budgets(self, scheduled: list[ScheduledSequence]) -> list[Budget]:
        """Return what the drafters may draft; draft tokens stay on the device where the step can run them unseen."""
        budgets = [self._draft_budget(each) for each in scheduled]
        if self.runner.supports_async and can_draft_on_device(
            scheduled, budgets, self.drafter, str(self.runner.device)
        ):
            has_grammar = any(self.states[each.seq.id].matcher is not None for each in scheduled)
            if not has_grammar:  # a grammar checks draft tokens on the host
                budgets = [replace(budget, on_device=True) for budget in budgets]
        return budgets

    def _draft_budget(self, scheduled: ScheduledSequence) -> Budget:
        """Return the drafter's budget: none where a budget without a drafter is meant for tokens a grammar forces."""
        budget = scheduled.budget
        for_grammar = budget.nodes and not budget.drafter and self.drafter.name
        return Budget() if for_grammar and self.states[scheduled.seq.id].matcher is not None else budget

    def _apply_grammar(self, scheduled: ScheduledSequence, draft: Draft) -> Draft:
        """Draft the tokens that a sequence's grammar forces, or cut its draft at the first forbidden token."""
        matcher = self.states[scheduled.seq.id].matcher
        if matcher is None:
            return draft
        try:
            return apply_grammar(draft, matcher, scheduled.budget)
        except GrammarError:  # if more than this draft is wrong, verification reports it
            return Draft()

    @property
    def drafter(self) -> MixDrafter:
        return self.safe_drafter.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        if drafter.traits.hidden_layers:  # its KV of the running sequences does not exist yet: recompute them
            self.scheduler.recompute_all()
        self.async_scheduler.discard()  # the next step computes the same tokens again
        self.safe_drafter = SafeDrafter(drafter, self.runner.model.config.vocab)
        self.verifier.drafter = self.safe_drafter

    @property
    def busy(self) -> bool:
        """Return whether any request has not finished."""
        return bool(self.states)

    def add(self, request: Request, grammar: Grammar | None = None) -> SequenceState:
        """Queue a request; `grammar` is its `structured_outputs`, compiled."""
        self.check(request)
        assert (grammar is None) == (request.params.structured_outputs is None), "structured_outputs need a grammar"
        seq = Sequence(next(self._ids), request, list(request.prompt))
        detokenizer = Detokenizer(request, self.tokenizer)
        matcher = None if grammar is None else grammar.matcher(detokenizer.stop_token_ids)
        state = SequenceState(seq, detokenizer, matcher, SpeculationStats(rule=request.rule))
        self.states[seq.id] = state
        self.scheduler.add(seq)
        return state

    def check(self, request: Request) -> None:
        """Raise CapacityError for a request that does not fit into the KV cache even alone."""
        pool = self.runner.pool
        num_tokens = len(request.prompt) + request.max_tokens
        if pool.pages_for(num_tokens) > pool.count:
            raise CapacityError(
                f"the request may need {num_tokens} tokens of KV cache, which holds {pool.count * pool.page_size}; "
                "lower max_tokens or raise kv_memory"
            )

    def plain_seconds(self, batch: int, context: int) -> float | None:
        """Return the expected time of a step without drafts for `batch` sequences with `context` cached tokens."""
        return self.controller.plain_seconds(batch, context)

    def abort(self, request_id: str) -> list[Delta]:
        """Abort all choices of a request; its pages are free when this returns."""
        states = [state for state in self.states.values() if state.seq.request.id == request_id]
        for state in states:
            state.seq.finish_reason = "abort"
            self._remove(state)
        return [Delta(request_id, state.seq.request.choice, (), "", (), finish_reason="abort") for state in states]

    def release(self, seq: Sequence) -> None:
        """Free the pages that a sequence does not need after a step; all of them if it has finished."""
        self.scheduler.release_unused(seq)
        if seq.finish_reason is not None:
            self._remove(self.states[seq.id])

    def _remove(self, state: SequenceState) -> None:
        del self.states[state.seq.id]
        self.scheduler.remove(state.seq)
        self.controller.forget(state.seq)
        self.safe_drafter.forget(state.seq)
        if not self.states:
            self.async_scheduler.go_idle()
        self.stats.drafter_failures = self.safe_drafter.failures

    def _record_starts(self, scheduled: list[ScheduledSequence]) -> None:
        """Record when a sequence is first scheduled, and how much of its prompt the prefix cache had."""
        for each in scheduled:
            state = self.states[each.seq.id]
            if state.timings.started is None:
                state.timings.started = perf_counter()
                state.cached_prompt_tokens = each.start
                self.stats.cached_prompt_tokens += each.start
