"""Guesses of Medusa heads in one call of the native library. The definition is the head's own `forward`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.bounds import require
from foretell.kernels.native.head_records import MedusaRecord, MedusaRowsRecord
from foretell.kernels.native.library import Library
from foretell.models.heads import MedusaHead
from foretell.models.layers import Linear

from .native_head import Told, weights_address


class NativeMedusa:
    """All places ahead at once."""

    def __init__(self, native: Library, head: MedusaHead) -> None:
        self._native, self._outputs = native, head.config.outputs
        blocks = [block for blocks in head.blocks for block in blocks.modules() if isinstance(block, Linear)]
        outputs = [each for each in head.outputs if isinstance(each, Linear)] or [head.output]
        self._blocks, self._tops = _table(blocks), _table(outputs)
        self._held = (head, head.draft_ids.contiguous())
        level = outputs[0].native
        assert level is not None, "native_for_head looked"
        self._record = MedusaRecord(
            ctypes.addressof(self._blocks),
            ctypes.addressof(self._tops),
            None if head.tap_norm is None or not head.config.target_norm else head.tap_norm.data_ptr(),
            None if head.config.draft_vocab is None else self._held[1].data_ptr(),
            head.config.layers,
            head.config.layer.width,
            head.tap_eps,
            level.level,
            len(outputs) == 1,
        )

    def guess(self, features: Tensor, depth: int) -> Told:
        """The likeliest tokens; `features` [texts, width] are the target's last states."""
        guesses, sure = np.empty((depth, len(features)), np.int64), np.empty((depth, len(features)), np.float32)
        self._run(features, depth, (guesses.ctypes.data, sure.ctypes.data))
        return Told(guesses.tolist(), sure.tolist())

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """[depth, texts, outputs]."""
        return self._run(features, depth, (None, None))

    def _run(self, features: Tensor, depth: int, out: tuple[int | None, int | None]) -> Tensor:
        require(features.is_contiguous() and features.dtype == torch.float32, "contiguous float32 hidden states")
        logits = torch.empty(depth, len(features), self._outputs)
        rows = MedusaRowsRecord(features.data_ptr(), logits.data_ptr(), *out, len(features), depth)
        self._native.medusa(self._record, rows)
        return logits


def _table(layers: list[Linear]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(layers))(*(weights_address(layer) for layer in layers))
