"""CPU swap space for the KV pages of preempted sequences."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from foretell.types import Sequence

from .cache import KVCache

LOG = logging.getLogger("foretell")
COPY_SAMPLES = 3  # copies that are timed synchronously
PREFILL_EMA = 0.2  # weight of the latest measurement in the moving average
MIN_PREFILL_TOKENS = 64  # prefilled tokens from which a step is timed


@dataclass(frozen=True)
class SwappedPages:
    """The pages of one sequence, [pages, page_size, kv_heads, head_dim] for each tensor of the cache."""

    num_tokens: int
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Swap:
    """Swaps pages out and in where copying is faster than recomputing the prefill. Both are measured."""

    def __init__(self, cache: KVCache, room: int) -> None:
        self.cache, self.capacity = cache, room
        self.used = 0  # bytes
        self.swapped_out = self.swapped_in = 0  # sequences
        self._swapped: dict[int, SwappedPages] = {}
        self._copy_seconds: list[float] = []  # seconds per token for both directions
        self._prefill_seconds: float | None = None  # seconds per token

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step that prefilled `tokens` tokens."""
        if tokens >= MIN_PREFILL_TOKENS:
            new, old = seconds / tokens, self._prefill_seconds
            self._prefill_seconds = new if old is None else old + PREFILL_EMA * (new - old)

    @property
    def is_faster(self) -> bool:
        """Return whether swapping is faster than recomputing; True until both are measured."""
        if self._prefill_seconds is None or len(self._copy_seconds) < COPY_SAMPLES:
            return True
        return sorted(self._copy_seconds)[COPY_SAMPLES // 2] < self._prefill_seconds

    def swap_out(self, seq: Sequence) -> None:
        """Copy the pages of `seq` to the host before they are released, if that pays and there is space."""
        pages = -(-seq.num_computed_tokens // self.cache.page_size)
        if not pages or not self.is_faster or seq.request.params.prompt_logprobs is not None:
            return
        if self.used + pages * self._page_bytes > self.capacity:
            return
        began = perf_counter()
        try:
            swapped = SwappedPages(
                seq.num_computed_tokens, [_to_host(tensor, seq.pages[:pages]) for tensor in self._tensors]
            )
        except Exception as error:  # usually out of memory, on the device or on the host
            LOG.warning("could not copy the pages of a preempted sequence; it is prefilled again: %s", error)
            return
        self.forget(seq)
        self._swapped[seq.id] = swapped
        self.used += swapped.nbytes
        self.swapped_out += 1
        if len(self._copy_seconds) < COPY_SAMPLES:
            _synchronize(self._tensors[0])
            self._copy_seconds.append(2 * (perf_counter() - began) / seq.num_computed_tokens)

    def num_tokens(self, seq: Sequence) -> int:
        """Return the number of tokens of `seq` in swap space."""
        swapped = self._swapped.get(seq.id)
        return 0 if swapped is None else swapped.num_tokens

    def swap_in(self, seq: Sequence) -> None:
        """Copy the swapped pages to the pages `seq` holds now; those of its computed tokens may be there already."""
        swapped = self._swapped[seq.id]
        pages = -(-swapped.num_tokens // self.cache.page_size)
        first = seq.num_computed_tokens // self.cache.page_size
        self.forget(seq)
        try:
            for tensor, kept in zip(self._tensors, swapped.tensors, strict=True):
                tensor[seq.pages[first:pages]] = _to_device(kept[first:], tensor)
        except Exception as error:  # the copy allocates memory
            LOG.warning("could not copy pages back to the device; the sequence is prefilled again: %s", error)
            return
        seq.num_computed_tokens = swapped.num_tokens
        self.swapped_in += 1

    def forget(self, seq: Sequence) -> None:
        swapped = self._swapped.pop(seq.id, None)
        if swapped is not None:
            self.used -= swapped.nbytes

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.cache.tensors

    @property
    def _page_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self._tensors)


def _to_host(tensor: Tensor, pages: list[int]) -> Tensor:
    some = tensor[pages]
    if not some.is_cuda:
        return some
    return torch.empty(some.shape, dtype=some.dtype, pin_memory=True).copy_(some, non_blocking=True)


def _to_device(kept: Tensor, like: Tensor) -> Tensor:
    return kept.to(like.device, non_blocking=True)


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
