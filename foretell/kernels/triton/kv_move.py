# mypy: ignore-errors
"""Slots of a cache copied in every layer at once: what accepting a branch of a tree needs, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WORD = 4  # bytes that are copied as one
MOST = 64  # slots of a launch
TURNS = 16  # launches that may be on their way


@triton.jit(do_not_specialize=["count"])  # else one slot would be compiled for by itself
def _move(places, widths, slots, count, BLOCK: tl.constexpr):
    """Some words of every slot of one tensor, in the order of the slots."""
    tensor = tl.program_id(0)
    base = tl.load(places + tensor).to(tl.pointer_type(tl.int32))
    width = tl.load(widths + tensor)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for n in range(count):
        source = tl.load(slots + n)
        target = tl.load(slots + count + n)
        words = tl.load(base + source * width + i, mask=i < width, other=0)
        tl.store(base + target * width + i, words, mask=i < width)


class Mover:
    """Knows where the tensors of a cache lie: [pages, page_size, kv_heads, head_dim], of any shapes."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        device = tensors[0].device
        widths = [tensor[0, 0].nbytes // WORD for tensor in tensors]
        self.places = torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
        self.widths = torch.tensor(widths, device=device)
        self.pieces = triton.cdiv(max(widths), BLOCK)
        # Pinning memory takes longer than the copy: a few buffers are kept, and used in turn.
        self._slots = torch.zeros(TURNS, 2 * MOST, dtype=torch.int64, device=device)
        self._host = torch.zeros(TURNS, 2 * MOST, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers = self._host.numpy()
        self._sent = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(TURNS)]
        self._turn = 0

    def __call__(self, source: list[int], target: list[int]) -> None:
        """Copy slots. No slot may be read after it was written: each target lies before all later sources."""
        for begin in range(0, len(source), MOST):
            some = slice(begin, begin + MOST)
            slots = self._send(source[some] + target[some])
            _move[(len(self.places), self.pieces)](
                self.places, self.widths, slots, len(slots) // 2, BLOCK=BLOCK, num_warps=4, num_stages=1
            )

    def _send(self, numbers: list[int]) -> Tensor:
        self._turn = (self._turn + 1) % TURNS
        host, sent = self._host[self._turn, : len(numbers)], self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # until the last ones have left, which they mostly have
        self._numbers[self._turn, : len(numbers)] = numbers
        slots = self._slots[self._turn, : len(numbers)]
        slots.copy_(host, non_blocking=True)
        if sent is not None:
            sent.record()
        return slots
