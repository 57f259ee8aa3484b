"""An executor with async scheduling, as on a device, around one that computes at once."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from foretell.control.controller import FixedController, FreeDrafts
from foretell.draft.base import Drafter, Wrapper
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.executor import AsyncStep, Executor, StepOutput, StepTokens
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.sampling.sampling import SamplingRow, sample
from foretell.types import Budget, Draft, Sequence


class FakeAsyncExecutor(Executor):
    """Reference for async executors. The next step overwrites a step's logits, and its tokens are returned once."""

    supports_async = True

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_steps = 0
        self.sent = 0  # steps launched before their tokens were known
        self.num_device_drafts = 0  # steps with draft tokens that only the device knows
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        self.num_steps += 1
        self._logits.fill_(float("nan"))
        output = self.inner.forward(packed, taps)
        self._logits = logits = output.logits.clone()
        return StepOutput(logits, output.hidden_states, lambda: logits.argmax(-1).tolist())

    @torch.inference_mode()
    def forward_async(
        self, packed: BatchLayout, taps: tuple[int, ...], draws: SamplingBatch | None, top: int
    ) -> AsyncStep | None:
        self.sent += 1
        logits = self._logits
        assert not logits.isnan().any()
        tokens: list[int] = logits.argmax(-1).tolist()
        if draws is not None:
            tokens = sample(logits, [SamplingRow(*each) for each in zip(*draws, strict=True)])
        top_tokens = logits.topk(min(top, logits.shape[-1])).indices.tolist() if top else []
        known = [token if token >= 0 else tokens[-1 - token] for token in packed.tokens]
        return AsyncStep(self.forward(replace(packed, tokens=known), taps), lambda: StepTokens(tokens, top_tokens))

    def forward_device_draft(
        self, packed: BatchLayout, taps: tuple[int, ...], draft_tokens: torch.Tensor
    ) -> StepOutput:
        assert min(packed.tokens) < 0 <= int(draft_tokens.min())
        self.num_device_drafts += 1
        found = draft_tokens.tolist()
        return self.forward(
            replace(packed, tokens=[token if token >= 0 else found[-1 - token] for token in packed.tokens]), taps
        )


class DeviceDraftDrafter(Wrapper):
    """Drafts like another drafter, but leaves the tokens on a fake device until they are waited for."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.traits = replace(inner.traits, draft_device="cpu")
        self.left = 0

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = self.inner.propose(seqs, budgets)
        if not all(budget.on_device for budget in budgets):
            return drafts
        there = torch.tensor([token for draft in drafts for token in draft.tokens], dtype=torch.int32)
        found, first = [], 0
        for draft in drafts:
            indices = tuple(-1 - index for index in range(first, first + len(draft)))
            kept = FakeDeviceDraft(there, list(draft.tokens), list(draft.confidence or [0.5] * len(draft)))
            found.append(Draft(indices, draft.parents, draft.source, device_draft=kept) if len(draft) else draft)
            first += len(draft)
        self.left += first
        return found


@dataclass
class FakeDeviceDraft:
    token_buffer: torch.Tensor
    tokens: list[int]
    confidence: list[float]

    def wait(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.confidence


class RandomController(FixedController):
    """Drafts in random steps, and expects a plain step at random in others, so that those are launched early."""

    def __init__(self, nodes: int, levels: int = 0, seed: int = 0) -> None:
        super().__init__(nodes, levels)
        self.rng = random.Random(seed)

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        return ([seq for seq in seqs if seq.request.drafters], self.num_tokens) if self.rng.random() < 0.5 else ([], 0)

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        if self.rng.random() < 0.75:
            return [Budget()] * len(seqs)
        drafters = [self.rng.choice(seq.request.drafters) if seq.request.drafters else "" for seq in seqs]
        return [self._budget(seq, drafter) for seq, drafter in zip(seqs, drafters, strict=True)]

    def expects_plain_step(self, seqs: list[Sequence]) -> bool:
        return self.rng.random() < 0.8

    def keeps_plain(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> bool:
        return self.rng.random() < 0.8
