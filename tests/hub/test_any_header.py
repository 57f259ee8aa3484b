"""Headers of any content are read, or refused in one line, with little memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from foretell.errors import ForetellError
from foretell.hub import open_checkpoint
from tests.allocations import Sizes

from .files import small_gguf, some_tensors, write_folder
from .formats import FORMATS

LIMIT = 32 << 20  # bytes; the files have a few kilobytes
MUTATIONS = st.lists(
    st.tuples(st.integers(0, 2000), st.sampled_from([1, 2, 4, 8]), st.integers(0, 2**64 - 1)), min_size=1, max_size=4
)
FIXTURE = [HealthCheck.function_scoped_fixture]
fuzzed = settings(max_examples=150, deadline=None, suppress_health_check=FIXTURE)


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Import what torch needs for listing allocations, which takes more memory than the files."""
    with Sizes():  # type: ignore[no-untyped-call]
        torch.zeros(1).clone()


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        with Sizes() as sizes:  # type: ignore[no-untyped-call]
            yield
        assert tracemalloc.get_traced_memory()[1] < LIMIT
        assert max(sizes.bytes, default=0) < LIMIT
    finally:
        tracemalloc.stop()


def read(path: Path) -> None:
    """Open a checkpoint and load all of it; only an error of ours, in one line, may stop that."""
    with little_memory():
        try:
            for _, tensor in open_checkpoint(path).tensors():
                tensor.load()
        except ForetellError as error:
            assert "\n" not in str(error)


def mutated(whole: bytes, header: int, mutations: list[tuple[int, int, int]]) -> bytes:
    """Return a file with little-endian numbers of 1 to 8 bytes written into its header."""
    changed = bytearray(whole)
    for place, size, value in mutations:
        at = place % max(1, header - size)
        changed[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(changed)


@fuzzed
@given(MUTATIONS)
def test_safetensors(tmp_path: Path, mutations: list[tuple[int, int, int]]) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": some_tensors("a", "b")})
    whole = (folder / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    (folder / "model.safetensors").write_bytes(mutated(whole, header, mutations))
    read(folder)


@fuzzed
@given(MUTATIONS)
def test_gguf(tmp_path: Path, mutations: list[tuple[int, int, int]]) -> None:
    path = small_gguf(tmp_path / "file.gguf")
    whole = path.read_bytes()
    path.write_bytes(mutated(whole, len(whole) - 64, mutations))
    read(path)


@pytest.mark.parametrize("number", [2**20, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**64 - 1])
def test_gguf_with_a_large_number_anywhere(number: int, tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "file.gguf")
    whole = path.read_bytes()
    for place in range(4, min(len(whole) - 8, 1200)):
        path.write_bytes(whole[:place] + struct.pack("<Q", number) + whole[place + 8 :])
        read(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**63, 2], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 10_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**62]},
    ],
)
def test_safetensors_with_impossible_sizes(entry: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    header = json.dumps({"a": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    read(folder)


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 7, 12, 32, 48, 96]), max_size=3)
TYPES = st.sampled_from([torch.float32, torch.float16, torch.int32, torch.uint8, torch.int8, torch.int64])


def write_layer(folder: Path, parts: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    named = {f"model.layers.0.mlp.up_proj.{part}": values.contiguous() for part, values in parts.items()}
    save_file(named, folder / "model.safetensors")


def packed(name: str) -> dict[str, torch.Tensor]:
    return FORMATS[name].pack(torch.randn(48, 96, generator=torch.Generator().manual_seed(0)))[0]


def with_other_parts(parts: dict[str, torch.Tensor], data: st.DataObject, fewest: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, at least `fewest` of them with another shape or type."""
    names = data.draw(st.lists(st.sampled_from(sorted(parts)), min_size=fewest, max_size=2))
    drawn = {part: (data.draw(SHAPES), data.draw(st.one_of(st.just(parts[part].dtype), TYPES))) for part in names}
    return parts | {part: torch.zeros(shape, dtype=dtype) for part, (shape, dtype) in drawn.items()}


@settings(max_examples=30, deadline=None, suppress_health_check=FIXTURE)
@given(st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_quantized_layers(name: str, tmp_path: Path, data: st.DataObject) -> None:
    write_layer(tmp_path, with_other_parts(packed(name), data, fewest=1), FORMATS[name].config)
    read(tmp_path)


SIZES = [0, 1, -1, 2, 3, 8, 16, 24, 40, 96, 128, 2048, (1 << 20) - 1, 1 << 20, 1 << 31, 1 << 63, -(1 << 63)]
NUMBERS = st.sampled_from(SIZES)
VALUES = st.one_of(
    *(NUMBERS, st.lists(NUMBERS, max_size=3), st.tuples(st.sampled_from([1, 24, 47]), NUMBERS).map(list)),
    *(st.none(), st.booleans(), st.floats(), st.sampled_from(["", "gptq_v2", "block", "NVFP4", "auto_round"])),
    st.dictionaries(st.sampled_from(["weights", "format", "block_structure"]), NUMBERS, max_size=2),
)
ENTRIES = (
    *("quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "packing_format", "data_type"),
    *("weight_block_size", "format", "config_groups", "block_structure", "quant_algo", "quantization", "dynamic"),
    *("extra_config", "sparsity_config", "transform_config", "version"),
)


def mappings(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and all configs in it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from mappings(value)


@settings(max_examples=40, deadline=None, suppress_health_check=FIXTURE)
@given(st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_entries_of_a_quantization_config(name: str, tmp_path: Path, data: st.DataObject) -> None:
    config = deepcopy(FORMATS[name].config)
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from(list(mappings(config))))
        section[data.draw(st.sampled_from([*section, *section, *ENTRIES]))] = data.draw(VALUES)
    write_layer(tmp_path, with_other_parts(packed(name), data, fewest=0), config)
    read(tmp_path)


@pytest.mark.parametrize("name", ["fp8 blocks", "ct fp8 blocks"])
@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("rows", [1, 24, 47, 48, 2048])
def test_blocks_of_any_size(name: str, rows: int, columns: int, tmp_path: Path) -> None:
    parts, config = packed(name), deepcopy(FORMATS[name].config)
    for section in mappings(config):
        for entry in section.keys() & {"weight_block_size", "block_structure"}:
            section[entry] = [rows, columns]
    (scale,) = (part for part in parts if "scale" in part)
    parts[scale] = torch.ones(-(-48 // rows), -(-96 // max(1, columns)))
    write_layer(tmp_path, parts, config)
    read(tmp_path)
