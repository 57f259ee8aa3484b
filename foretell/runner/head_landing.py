"""How what a draft tells comes to the host: the copy is a part of the recorded work, and the host waits for its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .head_choice import Found
from .head_tables import HeadSizes
from .recording import Recorder


class LandingRecorder(Recorder[HeadSizes, Found]):
    """What is told lies on the host, good until the next call; the work is over, so tables may be written again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._rooms: dict[HeadSizes, Tensor] = {}  # pinned: a device writes there while the host does something else

    def __call__(self, sizes: HeadSizes, run: Callable[[], Found], keep: bool = True) -> Found:
        if self.device.type != "cuda":
            return super().__call__(sizes, run, keep)
        found = super().__call__(sizes, lambda: self._sent(sizes, run()), keep)
        torch.cuda.current_stream(self.device).synchronize()
        return found

    def _sent(self, sizes: HeadSizes, found: Found) -> Found:
        """On its way. Work is run plainly before it is recorded, so no memory is taken in a recording."""
        if sizes not in self._rooms:
            self._rooms[sizes] = torch.empty(found.told.shape, dtype=found.told.dtype, pin_memory=True)
        return replace(found, told=self._rooms[sizes].copy_(found.told, non_blocking=True))
