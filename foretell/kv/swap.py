"""Pages of texts that had to make way, kept in the host's memory until they come back."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from foretell.types import Sequence

from .cache import KVCache

LOG = logging.getLogger("foretell")
COPY_SAMPLES = 3  # times a copy is waited for, to learn how long one takes
PREFILL_EMA = 0.2  # what the newest measurement counts
MIN_PREFILL_TOKENS = 64  # tokens of a step from which reading can be timed


@dataclass(frozen=True)
class SwappedPages:
    """The pages of one text: for each tensor of the cache [pages, page_size, kv_heads, head_dim]."""

    num_tokens: int
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Swap:
    """Keeps what copying brings back sooner than reading the text again would. Both are measured on the way."""

    def __init__(self, cache: KVCache, room: int) -> None:
        self.cache, self.capacity = cache, room
        self.used = self.swapped_out = self.swapped_in = 0  # bytes; texts
        self._swapped: dict[int, SwappedPages] = {}
        self._copy_seconds: list[float] = []  # seconds a token, there and back
        self._prefill_seconds: float | None = None  # seconds a token

    def observe(self, tokens: int, seconds: float) -> None:
        """A step read so many tokens."""
        if tokens >= MIN_PREFILL_TOKENS:
            new, old = seconds / tokens, self._prefill_seconds
            self._prefill_seconds = new if old is None else old + PREFILL_EMA * (new - old)

    @property
    def is_faster(self) -> bool:
        """Whether copying is faster; where either is not known yet it is tried."""
        if self._prefill_seconds is None or len(self._copy_seconds) < COPY_SAMPLES:
            return True
        return sorted(self._copy_seconds)[COPY_SAMPLES // 2] < self._prefill_seconds

    def swap_out(self, seq: Sequence) -> None:
        """`seq` is about to give its pages back: copy them, if that pays and there is room."""
        pages = -(-seq.cached // self.cache.page_size)
        if not pages or not self.is_faster or seq.request.params.prompt_logprobs is not None:
            return
        if self.used + pages * self._page_bytes > self.capacity:
            return
        began = perf_counter()
        try:
            stash = SwappedPages(seq.cached, [_to_host(tensor, seq.pages[:pages]) for tensor in self._tensors])
        except Exception as error:  # usually out of memory, on the device or on the host
            LOG.warning("could not copy the pages of a preempted sequence; it is prefilled again: %s", error)
            return
        self.forget(seq)
        self._swapped[seq.id] = stash
        self.used += stash.nbytes
        self.swapped_out += 1
        if len(self._copy_seconds) < COPY_SAMPLES:
            _synchronize(self._tensors[0])
            self._copy_seconds.append(2 * (perf_counter() - began) / seq.cached)

    def num_tokens(self, seq: Sequence) -> int:
        """How many tokens of a text are kept here."""
        stash = self._swapped.get(seq.id)
        return 0 if stash is None else stash.num_tokens

    def swap_in(self, seq: Sequence) -> None:
        """Copy what is kept to the pages `seq` holds now, which suffice; the first ones may hold it already."""
        stash = self._swapped[seq.id]
        pages = -(-stash.num_tokens // self.cache.page_size)
        there = seq.cached // self.cache.page_size
        self.forget(seq)
        try:
            for tensor, kept in zip(self._tensors, stash.tensors, strict=True):
                tensor[seq.pages[there:pages]] = _to_device(kept[there:], tensor)
        except Exception as error:  # the copy needs memory of its own
            LOG.warning("could not copy pages back to the device; the sequence is prefilled again: %s", error)
            return
        seq.cached = stash.num_tokens
        self.swapped_in += 1

    def forget(self, seq: Sequence) -> None:
        stash = self._swapped.pop(seq.id, None)
        if stash is not None:
            self.used -= stash.nbytes

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
