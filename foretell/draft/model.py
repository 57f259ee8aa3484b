"""Drafts from a smaller model, token by token, for a batch of sequences at once (Leviathan et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from foretell.draft.base import Drafter
from foretell.draft.draft_builder import ChainBuilder, DraftTokens
from foretell.draft.heads.sampling import DraftTemperature, sample_draft_tokens
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import NO_DRAFT, Budget, Draft, DrafterTraits, Request, ScheduledSequence, Sequence

MAX_ROWS = 512  # rows of one forward, unless the memory plan sets another number


@dataclass
class _DraftSequence:
    """The draft model's own copy of a sequence, with KV in pages of the draft model."""

    seq: Sequence
    verified: int = 0  # tokens known to be the sequence's; never shrinks


class ModelDrafter(Drafter):
    """A draft model with a runner of its own, which keeps the KV of all tokens that it shares with the target."""

    traits = DrafterTraits(samples=True, gives_probability=True, needs_prefill=True)
    max_rows = MAX_ROWS

    def __init__(
        self,
        runner: ModelRunner,
        vocab: int,
        name: str = "model",
        draft_temperature: DraftTemperature = "fixed",
        min_confidence: float = 0.0,
    ) -> None:
        """`vocab` is the target's. A chain whose path confidence falls below `min_confidence` ends."""
        self.runner, self.vocab, self.name = runner, vocab, name
        self.draft_temperature, self.min_confidence = draft_temperature, min_confidence
        self._draft_seqs: dict[int, _DraftSequence] = {}

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        chains = {seq.id: self._chain(budget) for seq, budget in zip(seqs, budgets, strict=True)}
        live = self._start([(seq, budget) for seq, budget in zip(seqs, budgets, strict=True) if budget.depth])
        self._prefill([self._draft_seqs[seq.id].seq for seq in live])
        offset = 0
        while live := [seq for seq in live if chains[seq.id].is_open]:
            sampled = self._sample(live, offset)
            for i, seq in enumerate(live):
                self._append(seq, chains[seq.id], sampled, i)
            offset += 1
        return [self._draft(seq, chains[seq.id]) for seq in seqs]

    def _chain(self, budget: Budget) -> ChainBuilder:
        return ChainBuilder(budget, max(self.min_confidence, budget.min_probability))

    def _start(self, wanted: list[tuple[Sequence, Budget]]) -> list[Sequence]:
        """Return the sequences that can be drafted for, with their copies up to date and pages reserved."""
        keep = {seq.id for seq, _ in wanted}
        return [seq for seq, budget in wanted if self._make_ready(seq, budget.depth, keep)]

    def _make_ready(self, seq: Sequence, nodes: int, keep: set[int]) -> bool:
        """Bring the copy of a sequence up to date; return False if the draft model lacks context or pages."""
        if len(seq.tokens) + nodes > self.runner.context:
            return False
        return self._reserve(self._catch_up(seq), len(seq.tokens) + nodes, keep)

    def _prefill(self, draft_seqs: list[Sequence]) -> None:
        """Run pending tokens, at most `max_rows` in a forward, until the rest of all sequences fits into one."""
        while sum(each.pending for each in draft_seqs) > self.max_rows and (chunk := self._next_chunk(draft_seqs)):
            self.runner.forward(chunk, [NO_DRAFT] * len(chunk))
            for scheduled in chunk:
                scheduled.seq.num_computed_tokens += scheduled.num_new_tokens

    def _next_chunk(self, draft_seqs: list[Sequence]) -> list[ScheduledSequence]:
        """Return the next forward of a prefill; the last token of a sequence runs with its first draft token."""
        chunk, rows_left = list[ScheduledSequence](), self.max_rows
        for seq in draft_seqs:
            count = min(seq.pending - 1, rows_left)
            if count > 0:
                chunk.append(ScheduledSequence.of(seq, count))
                rows_left -= count
        return chunk

    def _catch_up(self, seq: Sequence) -> Sequence:
        """Replace the tokens of the copy that differ from the sequence and keep the KV before them.

        That covers rejection, preemption and steps in which other drafters drafted.
        """
        own = self._draft_sequence(seq)
        copy, same = own.seq, own.verified
        while same < min(len(copy.tokens), len(seq.tokens)) and copy.tokens[same] == seq.tokens[same]:
            same += 1
        copy.tokens[same:] = seq.tokens[same:]
        copy.num_computed_tokens = min(copy.num_computed_tokens, same, len(seq.tokens) - 1)
        own.verified = len(seq.tokens)
        return copy

    def _draft_sequence(self, seq: Sequence) -> _DraftSequence:
        """Return the copy of a sequence, created once: a `Request` validates its parameters, which takes longer than
        a lookup."""
        if seq.id not in self._draft_seqs:
            self._draft_seqs[seq.id] = _DraftSequence(Sequence(seq.id, _draft_request(seq), []))
        return self._draft_seqs[seq.id]

    def _reserve(self, draft_seq: Sequence, tokens: int, keep: set[int]) -> bool:
        """Reserve pages for a copy, if necessary by evicting copies of sequences outside `keep`."""
        while not self.runner.reserve(draft_seq, tokens):
            others = (each.seq for each in self._draft_seqs.values())
            victim = next((seq for seq in others if seq.pages and seq.id not in keep), None)
            if victim is None:
                return False
            victim.num_computed_tokens = 0
            self.runner.trim(victim, 0)
        return True

    def _sample(self, seqs: list[Sequence], offset: int) -> DraftTokens:
        """Run the pending tokens of all copies and sample the draft token `offset` of each chain."""
        logits = self._forward(seqs)
        return sample_draft_tokens(_fit_vocab(logits, self.vocab), seqs, offset, self.draft_temperature)

    def _forward(self, seqs: list[Sequence]) -> Tensor:
        """Return the draft model's logits after each sequence, [sequences, draft vocab]."""
        copies = [self._draft_seqs[seq.id].seq for seq in seqs]
        scheduled = [ScheduledSequence.of(copy, copy.pending) for copy in copies]
        return self.runner.forward(scheduled, [NO_DRAFT] * len(seqs)).logits

    def _append(self, seq: Sequence, chain: ChainBuilder, sampled: DraftTokens, i: int) -> None:
        self._append_to_copy(seq, sampled.tokens[i])
        assert sampled.probs is not None, "draft tokens of a model come with their distributions"
        chain.append(sampled.tokens[i], sampled.confidence[i], sampled.probs[i])

    def _append_to_copy(self, seq: Sequence, token: int) -> None:
        copy = self._draft_seqs[seq.id].seq
        copy.num_computed_tokens = len(copy.tokens)
        copy.tokens.append(token)

    def _draft(self, seq: Sequence, chain: ChainBuilder) -> Draft:
        return chain.draft(self.name, seq.request.params.temperature > 0, chain.stacked_probs())

    def forget(self, seq: Sequence) -> None:
        own = self._draft_seqs.pop(seq.id, None)
        if own is not None:
            self.runner.trim(own.seq, 0)


class SelfDrafter(ModelDrafter):
    """A variant of the target itself (quantized, or its first layers only) over the target's own KV pages.

    It writes the KV of draft tokens after the cached tokens; verification overwrites it before the target reads it. The
    scheduler reserves the pages of draft tokens with the step, so nothing is kept between steps.
    """

    traits = DrafterTraits(samples=True, gives_probability=True)

    def _catch_up(self, seq: Sequence) -> Sequence:
        copy = self._draft_sequence(seq).seq
        copy.tokens, copy.num_computed_tokens, copy.pages = list(seq.tokens), seq.num_computed_tokens, seq.pages
        return copy

    def _reserve(self, draft_seq: Sequence, tokens: int, keep: set[int]) -> bool:
        return self.runner.pool.pages_for(tokens) <= len(draft_seq.pages)

    def forget(self, seq: Sequence) -> None:
        self._draft_seqs.pop(seq.id, None)  # the target frees its own pages


def _draft_request(seq: Sequence) -> Request:
    """Return the request of a copy: all tokens count as generated, and only logits are wanted."""
    return Request(seq.request.id, prompt=(), params=SamplingParams(), seed=0, max_tokens=0)


def _fit_vocab(logits: Tensor, vocab: int) -> Tensor:
    """Pad or cut logits to the target's vocabulary: models of one family pad their vocabularies differently."""
    missing = vocab - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, :vocab]
