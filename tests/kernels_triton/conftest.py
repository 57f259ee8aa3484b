"""Without a CUDA device Triton's kernels run in its interpreter, which must be chosen before they are imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
