"""Without a CUDA device Triton's kernels run in its interpreter, which must be chosen before they are imported."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
