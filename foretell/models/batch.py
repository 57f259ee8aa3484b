"""What a forward reads: runs of tokens from several sequences, laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretell.kernels.attention import Group


@dataclass(frozen=True)
class Batch:
    """No prefill and no decode: some new tokens over some cached ones."""

    tokens: Tensor  # [n]
    positions: Tensor  # [n]
    slots: Tensor  # [n] where each token's key and value go
    groups: list[Group]
