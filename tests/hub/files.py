"""Small model files for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

ROWS, COLUMNS = 3, 512
STORED = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
QUANTIZED = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
RAW = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS)
TOKENS = ["<s>", "Ġthe", "", "ünï", "龍"]


def encoded(kind: Kind, seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """A tensor's bytes: of random values where gguf can quantize them, else random themselves."""
    rng = np.random.default_rng(seed)
    if kind in QUANTIZED or kind in STORED:
        return gguf.quants.quantize(rng.standard_normal((rows, columns), dtype=np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], **values: Any) -> Path:
    """A GGUF file with some of each sort of metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 7)
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [3, 1, 1, 1, 1])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.5, 2.0, 3.0, 4.0])
    for key, value in values.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_gguf(path: Path) -> Path:
    """A GGUF file of three small tensors."""
    kinds = (Kind.F32, Kind.Q4_1, Kind.Q8_0)
    return write_gguf(path, {f"blk.{kind.name}": (encoded(kind, rows=2, columns=32), kind) for kind in kinds})


def write_folder(folder: Path, shards: dict[str, dict[str, torch.Tensor]], index: dict[str, str] | None = None) -> Path:
    """A model folder with these safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 4}')
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def some_tensors(*names: str) -> dict[str, torch.Tensor]:
    """A different small tensor for each name."""
    return {name: torch.arange(6, dtype=torch.float16).view(2, 3) + n for n, name in enumerate(names)}
