# mypy: ignore-errors
"""Compaction of the KV cache after a branch of a draft tree is accepted: slots of all layers move in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words per program
WORD_BYTES = 4  # bytes per word
MAX_SLOTS = 64  # slots per launch
BUFFERS = 16  # pinned buffers, hence launches in flight


@triton.jit(do_not_specialize=["count"])  # count == 1 would be compiled separately
def _kv_move_kernel(addresses, widths, slots, count, BLOCK: tl.constexpr):
    """Copy a block of words of every slot of one tensor, in the order of the slots."""
    tensor = tl.program_id(0)
    base = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    width = tl.load(widths + tensor)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for n in range(count):
        source = tl.load(slots + n)
        target = tl.load(slots + count + n)
        words = tl.load(base + source * width + i, mask=i < width, other=0)
        tl.store(base + target * width + i, words, mask=i < width)


class KVMover:
    """Moves slots of the tensors of a KV cache, [pages, page_size, kv_heads, head_dim] of any shapes."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        device = tensors[0].device
        widths = [tensor[0, 0].nbytes // WORD_BYTES for tensor in tensors]
        self.addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
        self.widths = torch.tensor(widths, device=device)
        self.num_blocks = triton.cdiv(max(widths), BLOCK)
        # Pinning memory takes longer than the copy, so a ring of buffers is kept.
        self._slots = torch.zeros(BUFFERS, 2 * MAX_SLOTS, dtype=torch.int64, device=device)
        self._host = torch.zeros(BUFFERS, 2 * MAX_SLOTS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers = self._host.numpy()
        self._events = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(BUFFERS)]
        self._next = 0

    def __call__(self, source: list[int], target: list[int]) -> None:
        """Copy slots in order. No slot is read after it was written: each target lies before all later sources."""
        for begin in range(0, len(source), MAX_SLOTS):
            some = slice(begin, begin + MAX_SLOTS)
            slots = self._send(source[some] + target[some])
            _kv_move_kernel[(len(self.addresses), self.num_blocks)](
                self.addresses, self.widths, slots, len(slots) // 2, BLOCK=BLOCK, num_warps=4, num_stages=1
            )

    def _send(self, numbers: list[int]) -> Tensor:
        self._next = (self._next + 1) % BUFFERS
        host, sent = self._host[self._next, : len(numbers)], self._events[self._next]
        if sent is not None:
            sent.synchronize()  # the copy that used this buffer last; usually finished
        self._numbers[self._next, : len(numbers)] = numbers
        slots = self._slots[self._next, : len(numbers)]
        slots.copy_(host, non_blocking=True)
        if sent is not None:
            sent.record()
        return slots
