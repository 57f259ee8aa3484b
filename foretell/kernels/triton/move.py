# mypy: ignore-errors
"""Slots of a cache copied in every layer at once: what accepting a branch of a tree needs, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
WORD = 4  # bytes that are copied as one


@triton.jit
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

    def __call__(self, source: list[int], target: list[int]) -> None:
        """Copy slots. No slot may be read after it was written: each target lies before all later sources."""
        slots = torch.tensor([source, target])
        if self.places.is_cuda:
            slots = slots.pin_memory().to(self.places.device, non_blocking=True)
        _move[(len(self.places), self.pieces)](
            self.places, self.widths, slots, len(source), BLOCK=BLOCK, num_warps=4, num_stages=1
        )
