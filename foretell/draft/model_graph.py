"""A draft model whose chains run as one CUDA graph, without a copy to the host between two draft tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from foretell.draft.draft_builder import ChainBuilder
from foretell.draft.heads.sampling import needs_draft_probs
from foretell.draft.model import ModelDrafter
from foretell.runner.cuda.graph_shapes import MAX_CHAIN_PREFILL
from foretell.runner.executor import PendingChains
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.types import NO_DRAFT, Budget, Draft, ScheduledSequence, Sequence, chain_parents


class GraphModelDrafter(ModelDrafter):
    """Drafts the same tokens as `ModelDrafter`, in one CUDA graph.

    The confidence of a sampled token is its probability before top-k, top-p and min-p, so a chain with a minimum
    confidence may end sooner. Drafts that need their distributions, to be verified by them, run step by step.
    """

    traits = replace(ModelDrafter.traits, single_graph=True, samples_single_graph=False)

    def __init__(self, runner: ModelRunner, *settings: Any, **named: Any) -> None:
        """Take the arguments of `ModelDrafter`."""
        super().__init__(runner, *settings, **named)
        self.traits = replace(self.traits, draft_device=str(runner.device))

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        wanted = [(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if budget.depth]
        if any(self._runs_step_by_step(seq) for seq, _ in wanted):
            return super().propose(seqs, budgets)
        ready = {seq.id for seq in self._start(wanted)}
        live = [(seq, budget) for seq, budget in wanted if seq.id in ready]
        if not live:
            return [NO_DRAFT] * len(seqs)
        copies = [self._draft_seqs[seq.id].seq for seq, _ in live]
        self._prefill_alone(copies)
        scheduled = [ScheduledSequence.of(copy, copy.pending) for copy in copies]
        sampling = _sampling_batch([seq for seq, _ in live])
        pending = self.runner.draft_chain(scheduled, max(budget.depth for _, budget in live), self.vocab, sampling)
        if pending is None:
            return super().propose(seqs, budgets)
        if all(budget.on_device for _, budget in live):
            batch = _DeviceBatch(self, pending, live)
            drafts = {seq.id: self._device_draft(batch, row, budget) for row, (seq, budget) in enumerate(live)}
            return [drafts.get(seq.id, NO_DRAFT) for seq in seqs]
        chains = self.fetch_chains(live, pending)
        return [chains[seq.id].draft(self.name) if seq.id in chains else NO_DRAFT for seq in seqs]

    def fetch_chains(self, live: list[tuple[Sequence, Budget]], pending: PendingChains) -> dict[int, ChainBuilder]:
        """Wait for the draft tokens and return the chains by sequence id."""
        chains = {seq.id: self._chain(budget) for seq, budget in live}
        for (seq, budget), tokens, confidences in zip(live, *pending.wait(), strict=True):
            if seq.id in self._draft_seqs:  # else the sequence has finished in the meantime
                self._fill(seq, budget, chains[seq.id], tokens, confidences)
        return chains

    def _device_draft(self, batch: _DeviceBatch, row: int, budget: Budget) -> Draft:
        """Return a draft of the full depth whose tokens stay on the device; their confidence is not known yet."""
        indices = batch.pending.token_indices(row, budget.depth)
        device_draft = _DeviceDraft(batch, row)
        placeholders = tuple(-1 - index for index in indices)
        return Draft(placeholders, chain_parents(len(indices)), self.name, device_draft=device_draft)

    def _prefill_alone(self, copies: list[Sequence]) -> None:
        """Prefill new sequences in a forward of their own: a chain after many rows would need its own graph."""
        self._prefill(copies)
        new = [copy for copy in copies if copy.pending > MAX_CHAIN_PREFILL]
        if new:
            scheduled = [ScheduledSequence.of(copy, copy.pending - 1) for copy in new]
            self.runner.forward(scheduled, [NO_DRAFT] * len(new))
            for copy in new:
                copy.num_computed_tokens = len(copy.tokens) - 1

    def _runs_step_by_step(self, seq: Sequence) -> bool:
        """Return whether a draft needs its distributions, or a temperature that depends on their entropy."""
        return needs_draft_probs(seq) or (seq.request.params.temperature > 0 and self.draft_temperature != "fixed")

    def _fill(
        self, seq: Sequence, budget: Budget, chain: ChainBuilder, tokens: list[int], confidences: list[float]
    ) -> None:
        """Keep as many tokens as a step-by-step draft would have; a draft on the device keeps its full depth."""
        for token, confidence in zip(tokens, confidences, strict=True):
            if not (len(chain.tokens) < budget.depth if budget.on_device else chain.is_open):
                break
            self._append_to_copy(seq, token)
            chain.append(token, confidence)


class _DeviceBatch:
    """The drafts of one step while their tokens are on the device; all chains are fetched at the first access."""

    def __init__(self, drafter: GraphModelDrafter, pending: PendingChains, live: list[tuple[Sequence, Budget]]) -> None:
        self.drafter, self.pending, self.live = drafter, pending, live

    @cached_property
    def chains(self) -> list[ChainBuilder]:
        return list(self.drafter.fetch_chains(self.live, self.pending).values())


@dataclass(frozen=True)
class _DeviceDraft:
    """The `DeviceDraft` of one sequence in the batch."""

    batch: _DeviceBatch
    row: int

    @property
    def token_buffer(self) -> Tensor:
        return self.batch.pending.token_buffer

    def wait(self) -> tuple[list[int], list[float]]:
        chain = self.batch.chains[self.row]
        return chain.tokens, chain.confidence


def _sampling_batch(seqs: list[Sequence]) -> SamplingBatch | None:
    """Return how the first draft tokens are sampled, or None if all requests are greedy."""
    params = [seq.request.params for seq in seqs]
    if all(each.temperature == 0 for each in params):
        return None
    return SamplingBatch(params, [seq.request.seed for seq in seqs], [len(seq.tokens) for seq in seqs])
