"""Which executor a model on a CUDA device gets."""

from __future__ import annotations

from importlib.util import find_spec

from foretell.kernels.attention import Layout
from foretell.kv.cache import KVCache
from foretell.models.decoder import Decoder

from .executor import EagerExecutor, Executor


def cuda_or_eager(model: Decoder, cache: KVCache, layout: Layout) -> Executor:
    """The fast one where Triton is here, else its definition."""
    if find_spec("triton") is None:
        return EagerExecutor(model, cache, layout)
    from .cuda import CudaExecutor

    return CudaExecutor(model, cache, layout)
