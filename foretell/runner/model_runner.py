"""Runs a model over sequences and their drafts, and owns its KV cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Protocol

import torch

from foretell.errors import RankError
from foretell.kv.cache import KVCache, LayerShape, slots_of
from foretell.kv.pages import PagePool
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import HeadConfig
from foretell.models.fast_paths import missing_fast_path
from foretell.runner.batch_layout import pack, pack_async
from foretell.runner.executor import AsyncStep, EagerExecutor, Executor, PendingChains, StepOutput
from foretell.runner.heads.ops import HeadOps, TorchHeadOps
from foretell.runner.native.executor import native_executor
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.types import NO_DRAFT, Draft, ScheduledSequence, Sequence


class Workers(Protocol):
    """Worker processes that hold the other shards of a model and of its KV cache."""

    def move(self, source: list[int], target: list[int]) -> None: ...
    def leader_ops(self, ops: TorchHeadOps) -> HeadOps: ...
    def configure_head(self, head: int, config: HeadConfig) -> None: ...
    def check(self) -> None: ...
    def on_failure(self, callback: Callable[[RankError], None]) -> None: ...


class ModelRunner:
    """Runs a target or a draft model; the two do not differ here."""

    def __init__(
        self,
        model: Decoder,
        pages: int,
        page_size: int,
        context: int,
        hidden_layers: tuple[int, ...] = (),
        extra_layers: tuple[LayerShape, ...] = (),
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`extra_layers` are KV cache layers after the model's own; draft heads write them.

        `kv_dtype` is the type of keys and values (default: the model's).
        """
        self.model, self.hidden_layers, self.context = model.eval(), hidden_layers, context
        self.device = model.embed.device
        model.prepare(context)
        self.layout = model.attention_layout(page_size)
        self.pool = PagePool(pages, page_size)
        self.cache = KVCache(model.layer_shapes + extra_layers, pages, page_size, model.dtype, self.device, kv_dtype)
        self.executor = self._make_executor()
        self.workers: Workers | None = None
        self.logits_device: torch.device | None = None  # move logits there; None: leave them on the model's device

    def set_device(self) -> None:
        """Make the model's device the current one of this thread; a new thread starts on the first device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def with_variant(self, model: Decoder) -> ModelRunner:
        """Return a runner of a variant of this model over the same pages. Its KV is good enough for drafts only."""
        assert self.workers is None, "a variant would have to exist on all ranks"
        other = copy.copy(self)
        other.model, other.hidden_layers = model.eval(), ()
        other.executor = other._make_executor()
        return other

    def forward(self, scheduled: list[ScheduledSequence], drafts: list[Draft]) -> StepOutput:
        """Run the new tokens and the draft of every scheduled sequence; their pages are reserved already."""
        packed = pack(scheduled, drafts, self.layout.page_size)
        device_draft = next((draft.device_draft for draft in drafts if draft.device_draft is not None), None)
        if device_draft is not None:
            return self.executor.forward_device_draft(packed, self.hidden_layers, device_draft.token_buffer)
        output = self.executor.forward(packed, self.hidden_layers)
        if self.logits_device is None or self.logits_device == self.device:
            return output
        return replace(output, logits=output.logits.to(self.logits_device))

    @property
    def supports_async(self) -> bool:
        """Return whether a step can be launched before the tokens of the previous one are known."""
        return self.executor.supports_async and self.workers is None and self.logits_device is None

    @property
    def num_steps(self) -> int:
        """Return the number of steps launched so far; meaningful only with `supports_async`."""
        return self.executor.num_steps

    def forward_async(
        self, scheduled: list[ScheduledSequence], rows: list[int], draws: SamplingBatch | None, top_k: int
    ) -> AsyncStep | None:
        """Launch a step of one token per sequence after the one in flight; see `Executor.forward_async`.

        `rows` are the rows of the step in flight whose next tokens this step runs.
        """
        packed = pack_async(scheduled, rows, self.layout.page_size)
        return self.executor.forward_async(packed, self.hidden_layers, draws, top_k)

    def draft_chain(
        self, scheduled: list[ScheduledSequence], steps: int, vocab: int, draws: SamplingBatch | None = None
    ) -> PendingChains | None:
        """Draft `steps` tokens of the first `vocab` for each sequence on the device, with their confidence.

        Tokens are the argmax, or sampled: `draws` describes the first token of each sequence, and the later ones are
        sampled with the positions that follow. Returns None if the executor cannot run the chains in one go.
        """
        if not self.executor.supports_draft_chain:
            return None
        packed = pack(scheduled, [NO_DRAFT] * len(scheduled), self.layout.page_size)
        spans = [replace(span, pages=tuple(each.seq.pages)) for span, each in zip(packed.spans, scheduled, strict=True)]
        return self.executor.draft_chain(replace(packed, spans=spans), steps, vocab, draws)

    @property
    def is_batch_invariant(self) -> bool:
        """Return whether a row's bits do not depend on the rest of the batch, so that rounding changes no token."""
        return self.executor.is_batch_invariant

    def _make_executor(self) -> Executor:
        has_kernels = missing_fast_path(self.model.config, self.device.type, self.context) is None
        if self.device.type == "cuda" and has_kernels and find_spec("triton") is not None:
            from foretell.runner.cuda.executor import CudaExecutor

            return CudaExecutor(self.model, self.cache, self.layout)
        return native_executor(self.model, self.cache) or EagerExecutor(self.model, self.cache, self.layout)

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        """Allocate pages for `tokens` tokens of `seq`; change nothing and return False if there are too few."""
        need = self.pool.pages_for(tokens) - len(seq.pages)
        if need <= 0:
            return True
        pages = self.pool.allocate(need)
        if pages is None:
            return False
        seq.pages += pages
        return True

    def compact_kv(self, seq: Sequence, root: int, path: tuple[int, ...]) -> None:
        """Move the KV of the accepted nodes to the slots after token `root`, the last one before the draft."""
        size = self.layout.page_size
        if path and path[-1] != len(path) - 1:  # an accepted chain is in place already
            stop = root + 2 + path[-1]
            slots = slots_of(seq.pages, size, root + 1, stop)
            first = next(at for at, node in enumerate(path) if node != at)  # the nodes before it are in place, too
            source, target = [slots[node] for node in path[first:]], slots[first : len(path)]
            if self.workers is not None:
                self.workers.move(source, target)
            self.cache.move(source, target)

    def leader_head_ops(self, ops: TorchHeadOps) -> HeadOps:
        """Return ops that run on the head shards of all ranks; `ops` are those of the first rank."""
        assert self.workers is not None, "a sharded head needs the other ranks"
        return self.workers.leader_ops(ops)

    def trim(self, seq: Sequence, tokens: int) -> None:
        """Free the pages of `seq` that its first `tokens` tokens do not need."""
        keep = self.pool.pages_for(tokens)
        if keep < len(seq.pages):
            self.pool.release(seq.pages[keep:])
            del seq.pages[keep:]
