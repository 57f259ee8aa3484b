"""Runs a model over sequences and their drafts, and keeps its keys and values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Protocol, cast

import torch

from foretell.errors import RankError
from foretell.kernels.attention import AttentionLayout
from foretell.kv.cache import KVCache, LayerShape, slots_of
from foretell.kv.pages import PagePool
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import HeadConfig
from foretell.runner.batch_layout import pack, pack_ahead
from foretell.runner.cuda.draft_chain import PendingChains
from foretell.runner.executor import AsyncExecutor, AsyncStep, EagerExecutor, Executor, StepOutput
from foretell.runner.heads.ops import HeadOps, TorchHeadOps
from foretell.runner.native.executor import NativeExecutor, native_executor
from foretell.sampling.cuda_sampler import SamplingBatch
from foretell.types import Draft, ScheduledSequence, Sequence


def cuda_or_eager(model: Decoder, cache: KVCache, layout: AttentionLayout) -> Executor:
    """The fast one where Triton is here, else its definition."""
    if find_spec("triton") is None:
        return EagerExecutor(model, cache, layout)
    from foretell.runner.cuda.executor import CudaExecutor

    return CudaExecutor(model, cache, layout)


class Workers(Protocol):
    """Other processes that have a part of the model, and of its cache."""

    def move(self, source: list[int], target: list[int]) -> None: ...
    def lead(self, work: TorchHeadOps) -> HeadOps: ...
    def wire(self, head: int, config: HeadConfig) -> None: ...
    def check(self) -> None: ...
    def listen(self, told: Callable[[RankError], None]) -> None: ...


class ModelRunner:
    """One class for target and draft models; it does not know which it is."""

    def __init__(
        self,
        model: Decoder,
        pages: int,
        page_size: int,
        context: int,
        taps: tuple[int, ...] = (),
        beside: tuple[LayerShape, ...] = (),
    ) -> None:
        """`beside` are further layers of the cache, which stand behind the model's own and are written by others."""
        self.model, self.hidden_layers, self.context = model.eval(), taps, context
        self.device = model.embed.device
        model.prepare(context)
        share, windows = model.local.heads // model.local.kv_heads, frozenset(model.config.windows)
        self.layout = AttentionLayout(page_size, share, windows, model.dtype, self.device)
        self.pool = PagePool(pages, page_size)
        self.cache = KVCache(model.layer_shapes + beside, pages, page_size, model.dtype, self.device)
        self.executor = self._make_executor()
        self.workers: Workers | None = None
        self.logits_device: torch.device | None = None  # where logits are wanted, if not where the model is

    def set_device(self) -> None:
        """Let what this thread starts run where the model is: kernels go to the thread's own device, which is the first
        one at its beginning."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def with_variant(self, model: Decoder) -> ModelRunner:
        """A runner for a variant of this model over the same pages; what it writes is good for drafts only."""
        assert self.workers is None, "a variant would have to lie on all ranks"
        other = copy.copy(self)
        other.model, other.hidden_layers = model.eval(), ()
        other.executor = other._make_executor()
        return other

    def forward(self, shares: list[ScheduledSequence], drafts: list[Draft]) -> StepOutput:
        """Run every share's tokens and draft; their pages are reserved already."""
        packed = pack(shares, drafts, self.layout.page_size)
        unseen = next((draft.device_draft for draft in drafts if draft.device_draft is not None), None)
        if unseen is not None:
            with torch.inference_mode():
                return cast(AsyncExecutor, self.executor).forward_device_draft(
                    packed, self.hidden_layers, unseen.token_buffer
                )
        if isinstance(self.executor, NativeExecutor):  # torch computes nothing, and its modes are dear to enter
            output = self.executor(packed, self.hidden_layers)
        else:
            with torch.inference_mode():
                output = self.executor(packed, self.hidden_layers)
        if self.logits_device is None or self.logits_device == self.device:
            return output
        return replace(output, logits=output.logits.to(self.logits_device))

    @property
    def supports_async(self) -> bool:
        """Whether a step can be begun before the tokens of the one before are known."""
        return hasattr(self.executor, "forward_async") and self.workers is None and self.logits_device is None

    @property
    def num_steps(self) -> int:
        """Steps that were run so far, where they may be sent ahead: one that was sent is the last of them."""
        return cast(AsyncExecutor, self.executor).num_steps

    @torch.inference_mode()
    def forward_async(
        self, shares: list[ScheduledSequence], rows: list[int], draws: SamplingBatch | None, top: int
    ) -> AsyncStep | None:
        """A step of one token a share behind the one that runs: see `AsyncExecutor`. `rows` are those of that one which
        come to the tokens."""
        executor = cast(AsyncExecutor, self.executor)
        return executor.forward_async(pack_ahead(shares, rows, self.layout.page_size), self.hidden_layers, draws, top)

    @torch.inference_mode()
    def draft_chain(
        self, shares: list[ScheduledSequence], steps: int, vocab: int, draws: SamplingBatch | None = None
    ) -> PendingChains | None:
        """After each share `steps` tokens of the first `vocab`, and how sure the model is of each: the likeliest, or
        drawn. `draws` tell how the first of each is drawn; those behind it stand at the places that follow.

        None where the executor has no way to run them in one go.
        """
        run = getattr(self.executor, "chain", None)
        if run is None:
            return None
        packed = pack(shares, [Draft()] * len(shares), self.layout.page_size)
        spans = [replace(span, pages=tuple(share.seq.pages)) for span, share in zip(packed.spans, shares, strict=True)]
        found: PendingChains | None = run(replace(packed, spans=spans), steps, vocab, draws)
        return found

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row has the same bits whatever runs beside it, so that nothing is left to rounding."""
        return isinstance(getattr(self.executor, "own", self.executor), NativeExecutor)  # of ranks, this one's own

    def _make_executor(self) -> Executor:
        if self.device.type == "cuda":
            return cuda_or_eager(self.model, self.cache, self.layout)
        return native_executor(self.model, self.cache) or EagerExecutor(self.model, self.cache, self.layout)

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        """Give `seq` pages for `tokens` tokens, or change nothing and say no."""
        need = self.pool.pages_for(tokens) - len(seq.pages)
        if need <= 0:
            return True
        pages = self.pool.allocate(need)
        if pages is None:
            return False
        seq.pages += pages
        return True

    def compact_kv(self, seq: Sequence, root: int, path: tuple[int, ...]) -> None:
        """Move the accepted nodes' keys and values up behind token `root`, the last before the draft."""
        size = self.layout.page_size
        if path and path[-1] != len(path) - 1:  # a chain lies in place
            stop = root + 2 + path[-1]
            slots = slots_of(seq.pages, size, root + 1, stop)
            still = next(at for at, node in enumerate(path) if node != at)  # those before lie in place, too
            source, target = [slots[node] for node in path[still:]], slots[still : len(path)]
            if self.workers is not None:
                self.workers.move(source, target)
            self.cache.move(source, target)

    def lead_head_ops(self, work: TorchHeadOps) -> HeadOps:
        """The first rank's part of a head, which from now on tells the others what it does."""
        assert self.workers is not None, "a part of a head goes with the parts of others"
        return self.workers.lead(work)

    def trim(self, seq: Sequence, tokens: int) -> None:
        """Take back the pages that `seq` does not need for its first `tokens` tokens."""
        keep = self.pool.pages_for(tokens)
        if keep < len(seq.pages):
            self.pool.release(seq.pages[keep:])
            del seq.pages[keep:]
