"""The error that the format of a run adds to each weight matrix of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretell.kernels.quant import QuantFormat, quantize_rows

from .hf_config import read_config
from .load import meta_model
from .quantize import layer_format, quantize_int4, quantize_int8
from .weights import CHUNK, check_tensors, decoder_tensors, output_tensor

if TYPE_CHECKING:
    from foretell.hub.checkpoint import Checkpoint
    from foretell.hub.tensor import LazyTensor


@dataclass(frozen=True)
class WeightError:
    """How one matrix is stored and run, and the error between the two, relative to the stored values.

    `max_error` is the largest difference by the largest value, `mean_error` the mean difference by the mean value, both
    of magnitudes.
    """

    tensor: str
    shape: tuple[int, ...]
    stored: str
    runs_as: str
    max_error: float
    mean_error: float


def weight_errors(checkpoint: Checkpoint, format: QuantFormat | None, dtype: torch.dtype) -> Iterator[WeightError]:
    """Yield the errors of the matrices that a step multiplies with, reading a few rows at a time."""
    config = read_config(checkpoint)
    decoder = meta_model(config, dtype)
    check_tensors(decoder, checkpoint)
    head = output_tensor(checkpoint, config)
    for tensor, target in decoder_tensors(decoder, checkpoint):
        if len(tensor.shape) != 2 or (target.rows is decoder.embed and tensor is not head):
            continue
        own = layer_format("head", format) if tensor is head and format is not None else format
        yield _error(tensor, own, dtype)


def _error(tensor: LazyTensor, format: QuantFormat | None, dtype: torch.dtype) -> WeightError:
    chunks = [
        _chunk_error(tensor.rows(at, at + CHUNK).float(), format, dtype) for at in range(0, tensor.shape[0], CHUNK)
    ]
    (largest, total), (largest_off, total_off) = (
        (max(chunk[at] for chunk in chunks), sum(chunk[at + 1] for chunk in chunks)) for at in (0, 2)
    )
    return WeightError(
        tensor=tensor.name,
        shape=tensor.shape,
        stored=tensor.dtype or "GGUF" if tensor.stored is None else tensor.stored.name,
        runs_as=format or str(dtype).removeprefix("torch."),
        max_error=largest_off / largest if largest else 0.0,
        mean_error=total_off / total if total else 0.0,
    )


def _chunk_error(weight: Tensor, format: QuantFormat | None, dtype: torch.dtype) -> tuple[float, float, float, float]:
    """Return the largest and the total magnitude of some rows, and of what the run changes in them."""
    size, off = weight.abs(), (as_run(weight, format, dtype) - weight).abs()
    return float(size.max()), float(size.double().sum()), float(off.max()), float(off.double().sum())


def as_run(weight: Tensor, format: QuantFormat | None, dtype: torch.dtype) -> Tensor:
    """Return a float32 matrix [out, in] with the values that a run in `format` multiplies with."""
    weight = weight.to(dtype).float()
    if format == "int4":
        return quantize_int4(weight).dequantized()
    if format == "int8":
        return quantize_int8(weight).dequantized()
    return weight if format is None else quantize_rows(weight, format).dequantized()
