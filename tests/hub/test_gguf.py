"""GGUF files: read as the gguf package reads them, refused in one line when they are not sound."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from foretell.errors import ForetellError, ModelError, UnsupportedModelError
from foretell.hub import LazyTensor, open_checkpoint
from foretell.hub.gguf_dequant import can_dequantize, dequantize
from tests.hub.files import COLUMNS, QUANTIZED, RAW, ROWS, STORED, TOKENS, encoded, small_gguf, write_gguf

SOUND_KINDS = (*STORED, *QUANTIZED, *RAW)


def refusal(path: Path) -> str:
    """Return the error of open_checkpoint for a file that it refuses: one line that names the file."""
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def only_tensor(path: Path) -> LazyTensor:
    ((_, tensor),) = open_checkpoint(path).tensors()
    return tensor


@pytest.mark.parametrize("kind", SOUND_KINDS, ids=lambda kind: kind.name)
def test_a_tensor_equals_what_gguf_makes_of_it(tmp_path: Path, kind: Kind) -> None:
    data = encoded(kind)
    tensor = only_tensor(write_gguf(tmp_path / "m.gguf", {"w": (data, kind)}))
    loaded = tensor.load()
    assert tensor.shape == tuple(loaded.shape) == (ROWS, COLUMNS)
    assert loaded.dtype == STORED.get(kind, torch.float32)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(loaded.float().numpy(), wanted)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(5))
def test_the_fast_path_equals_gguf_bit_for_bit(kind: Kind, seed: int) -> None:
    data = encoded(kind, seed, rows=65, columns=96) if seed else np.zeros_like(encoded(kind, rows=65, columns=96))
    fast = dequantize(data.ravel(), kind.name, (65, 96))
    assert np.array_equal(fast.numpy().view(np.int32), gguf.quants.dequantize(data, kind).view(np.int32))


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_the_fast_path_equals_gguf_on_any_bytes(kind: Kind) -> None:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(1).integers(0, 256, (4096, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(dequantize(data.ravel(), kind.name, (4096, 32)).numpy(), wanted)


def test_metadata_are_plain_values(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_gguf(tmp_path / "m.gguf"))
    assert checkpoint.kind == "gguf" and checkpoint.generation == {} and checkpoint.tokenizer_files == {}
    assert checkpoint.config == {
        "general.architecture": "llama",
        "llama.block_count": 7,
        "llama.rope.freq_base": 0.5,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.0, 3.0, 4.0],
    }
    assert checkpoint.config["tokenizer.ggml.add_bos_token"] is True


def test_tensors_keep_the_order_of_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_gguf(tmp_path / "m.gguf"))
    assert [name for name, _ in checkpoint.tensors()] == ["blk.F32", "blk.Q4_1", "blk.Q8_0"]


def test_a_loaded_tensor_outlives_its_checkpoint_and_may_be_written(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "m.gguf")
    before = path.read_bytes()
    loaded = [tensor.load() for _, tensor in open_checkpoint(path).tensors()]
    for tensor in loaded:
        tensor.zero_()
    assert path.read_bytes() == before
    assert any(tensor.load().any() for _, tensor in open_checkpoint(path).tensors())


def test_another_alignment_is_honoured(tmp_path: Path) -> None:
    data = encoded(Kind.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("w", data, raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(only_tensor(tmp_path / "m.gguf").load(), gguf.quants.dequantize(data, Kind.Q8_0))


def nested(depth: int) -> bytes:
    """A file whose only value is a list in a list in a list."""
    array = struct.pack("<IQ", 4, 2) + struct.pack("<2I", 5, 6)
    for _ in range(depth - 1):
        array = struct.pack("<IQ", 9, 1) + array
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + array


def test_lists_may_nest_but_not_without_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(nested(3))
    assert open_checkpoint(path).config == {"k": [[[5, 6]]]}
    path.write_bytes(nested(10_000))
    assert "damaged" in refusal(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = small_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    # The last tensor's padding may go; everything else is needed.
    for size in range(len(whole) - 31):
        path.write_bytes(whole[:size])
        refusal(path)


def test_a_file_cut_in_its_last_string_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    text = struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 9) + b"cut short"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text)
    assert open_checkpoint(path).config == {"k": "cut short"}
    path.write_bytes(path.read_bytes()[:-1])
    assert "ends inside its header" in refusal(path)


def test_no_changed_byte_ends_in_a_foreign_error(tmp_path: Path) -> None:
    whole = small_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "changed.gguf"
    for place in range(len(whole)):
        for value in (0, whole[place] ^ 1, whole[place] ^ 0x80, 255):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            load_or_refuse(path)


def load_or_refuse(path: Path) -> None:
    """Load everything; only an error of ours, in one line, may stop it."""
    try:
        for _, tensor in open_checkpoint(path).tensors():
            assert tuple(tensor.load().shape) == tensor.shape
    except ForetellError as error:
        assert str(path) in str(error) and "\n" not in str(error)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"PK\x03\x04" * 10):
        path.write_bytes(content)
        assert "not a GGUF file" in refusal(path)
    assert "no such file" in refusal(tmp_path / "none.gguf")


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_another_version_or_byte_order_is_not_supported(tmp_path: Path, version: int, words: str) -> None:
    content = small_gguf(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
    with pytest.raises(UnsupportedModelError, match=words):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_kind_gguf_cannot_decode_is_refused_by_name(tmp_path: Path) -> None:
    assert not can_dequantize("Q8_K")
    path = write_gguf(tmp_path / "m.gguf", {"rare": (encoded(Kind.Q8_K), Kind.Q8_K)})
    with pytest.raises(UnsupportedModelError, match=r"'rare' is of type Q8_K"):
        open_checkpoint(path)


def test_one_file_of_several_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"w": (encoded(Kind.F32), Kind.F32)}, split__count=3)
    with pytest.raises(UnsupportedModelError, match="one of 3 files"):
        open_checkpoint(path)


def test_a_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-64])
    assert "tensor 'blk.Q8_0' ends at byte" in refusal(path)
