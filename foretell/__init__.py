"""Foretell: lossless speculative decoding for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretell.utils.system import limit_openmp_spinning

from .version import VERSION as __version__

if TYPE_CHECKING:
    from .llm import LLM
    from .outputs import CompletionOutput, RequestOutput
    from .sampling_params import SamplingParams
    from .types import SpeculationChoice

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "SpeculationChoice", "__version__"]

limit_openmp_spinning()  # the only side effect of the import; it must come before torch is imported

_MODULES = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "SpeculationChoice": "types",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `foretell --help` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'foretell' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
