"""Loading: types, devices, sizes, and no more memory than it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import RequestError
from foretell.hub import Checkpoint
from foretell.models.hf_config import from_hf
from foretell.models.layers import Linear
from foretell.models.load import choose_dtype, load_model, weight_bytes

from .checkpoints import GEMMA, GGUF, LLAMA, folder, gguf
from .test_weights import tensors_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "device", "chosen"),
    [
        (folder({"dtype": "bfloat16"}), "auto", CPU, torch.float32),
        (folder({"dtype": "bfloat16"}), "auto", CUDA, torch.bfloat16),
        (folder({"torch_dtype": "float16"}), "auto", CUDA, torch.float16),
        (folder({"torch_dtype": "float32"}), "auto", CUDA, torch.float32),
        (folder({}), "auto", CUDA, torch.bfloat16),
        (folder({}), "float16", CPU, torch.float16),
        (folder({}), torch.bfloat16, CPU, torch.bfloat16),
        (gguf({"general.file_type": 1}), "auto", CUDA, torch.float16),
        (gguf({"general.file_type": 15}), "auto", CUDA, torch.bfloat16),
        (gguf({}), "auto", CUDA, torch.bfloat16),
    ],
)
def test_dtype(checkpoint: Any, dtype: Any, device: torch.device, chosen: torch.dtype) -> None:
    assert choose_dtype(checkpoint, dtype, device) == chosen


def test_unknown_dtype() -> None:
    with pytest.raises(RequestError, match="did you mean 'float32'"):
        choose_dtype(folder({}), "float23", CPU)


@pytest.mark.parametrize("config", [LLAMA, GEMMA, LLAMA | {"tie_word_embeddings": True}])
def test_loaded_decoder(config: dict[str, Any]) -> None:
    tensors = tensors_for(config)
    decoder = load_model(folder(config, tensors), "bfloat16")
    assert not decoder.training
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in decoder.parameters())
    assert torch.equal(decoder.embed, tensors["model.embed_tokens.weight"].bfloat16())
    assert (decoder.head.weight is decoder.embed) == decoder.config.tied


def test_gemma_norms_are_rounded_once() -> None:
    tensors = tensors_for(GEMMA)
    stored = tensors["model.norm.weight"].fill_(0.004)
    assert load_model(folder(GEMMA, tensors), "bfloat16").norm.weight[0] == (1 + stored[0]).bfloat16()


@pytest.mark.parametrize("config", [LLAMA, GEMMA, LLAMA | {"tie_word_embeddings": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes(config: dict[str, Any], dtype: torch.dtype) -> None:
    decoder = load_model(folder(config, tensors_for(config)), dtype)
    decoder.prepare(16)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in decoder.parameters()}
    packed = [module for module in decoder.modules() if isinstance(module, Linear) and module.packed is not None]
    size = sum(held.values()) + sum(module.inputs * module.outputs * dtype.itemsize for module in packed)
    assert weight_bytes(from_hf(config), dtype) == size


@pytest.mark.parametrize("checkpoint", [folder(LLAMA, tensors_for(LLAMA)), gguf(GGUF, tensors_for(LLAMA, True))])
def test_only_the_parameters_are_made(checkpoint: Checkpoint) -> None:
    """No matrix is copied on the way from the file to the decoder, not even to lay its rows otherwise."""
    with Allocations() as allocations:  # type: ignore[no-untyped-call]
        decoder = load_model(checkpoint)
    matrices = [parameter for parameter in decoder.parameters() if parameter.dim() > 1]
    assert allocations.matrices == len(matrices)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrices that operations make in memory."""

    matrices = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and result.device.type == "cpu":
            given = {place(arg) for arg in args if isinstance(arg, torch.Tensor)}
            self.matrices += place(result) not in given
        return result


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
