"""Quantized Hugging Face checkpoints: each format is one module with the definition of its dequantization."""

from __future__ import annotations

from foretell.hub.quantized.dequantized import dequantized_tensors, describe_formats
from foretell.hub.quantized.settings import Quantization, read_quantization

__all__ = ["Quantization", "dequantized_tensors", "describe_formats", "read_quantization"]
