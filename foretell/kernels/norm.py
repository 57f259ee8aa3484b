"""Root-mean-square norm (RMSNorm), the torch reference."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., width] divided by its root mean square, times weight [width]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
