"""Model folders: whole or refused, with the name of what is missing."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from foretell.errors import ForetellError, ModelError, UnsupportedModelError
from foretell.hub import open_checkpoint
from tests.hub.files import some_tensors, write_folder


def refusal(folder: Path) -> str:
    """What open_checkpoint says of a folder it will not open: always one line that names it."""
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.load() for name, tensor in open_checkpoint(folder).tensors()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def sharded(folder: Path) -> Path:
    first, second = some_tensors("a", "b"), some_tensors("c")
    index = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    return write_folder(folder, {"model-1.safetensors": first, "model-2.safetensors": second}, index)


def test_a_single_file_gives_what_was_saved(tmp_path: Path) -> None:
    tensors = some_tensors("a", "b") | {"half": torch.ones(2, 2, dtype=torch.bfloat16), "one": torch.tensor(1.5)}
    folder = write_folder(tmp_path, {"model.safetensors": tensors})
    assert same(loaded(folder), tensors)
    checkpoint = open_checkpoint(folder)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors()}["a"] == (2, 3)
    assert loaded(folder)["half"].dtype == torch.bfloat16
    assert checkpoint.kind == "folder" and checkpoint.config["hidden_size"] == 4


def test_shards_give_what_was_saved(tmp_path: Path) -> None:
    assert same(loaded(sharded(tmp_path)), some_tensors("a", "b") | some_tensors("c"))


def test_files_without_an_index_are_taken_together(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"x.safetensors": some_tensors("a"), "y.safetensors": some_tensors("b")})
    assert sorted(open_checkpoint(folder).lazy_tensors) == ["a", "b"]
    write_folder(folder, {"z.safetensors": some_tensors("a")})
    assert "'a'" in refusal(folder)


def test_a_single_file_goes_before_others(tmp_path: Path) -> None:
    both = {"consolidated.safetensors": some_tensors("x"), "model.safetensors": some_tensors("a")}
    assert list(open_checkpoint(write_folder(tmp_path, both)).lazy_tensors) == ["a"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model-2.safetensors").unlink()
    assert "lacks model-2.safetensors" in refusal(folder)
    (folder / "model-1.safetensors").unlink()
    assert "lacks model-1.safetensors, model-2.safetensors" in refusal(folder)


def test_a_tensor_that_only_the_index_has_is_named(tmp_path: Path) -> None:
    files = {"model-1.safetensors": some_tensors("a")}
    folder = write_folder(tmp_path, files, {"a": "model-1.safetensors", "gone": "model-1.safetensors"})
    assert "lacks tensor 'gone'" in refusal(folder)


@pytest.mark.parametrize("name", ["../model-1.safetensors", "sub/x.safetensors", "model.bin", "", ".."])
def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path, name: str) -> None:
    assert "not a safetensors file of this folder" in refusal(write_folder(tmp_path, {}, {"a": name}))


@pytest.mark.parametrize("content", ['{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}", "[]", "{", "\xff"])
def test_a_senseless_index_is_refused(tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    assert "model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN,}'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_senseless_config_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": some_tensors("a")})
    (folder / name).write_bytes(content)
    assert name in refusal(folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "has no *.safetensors" in refusal(tmp_path)
    write_folder(tmp_path, {"model.safetensors": some_tensors("a")})
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in refusal(tmp_path)


def test_pickles_are_refused_unread(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    assert "convert them to safetensors" in refusal(folder)


@pytest.mark.parametrize("shards", [{}, {"adapter_model.safetensors": some_tensors("a")}])
def test_an_adapter_is_refused_as_one(tmp_path: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    folder = write_folder(tmp_path, shards)
    (folder / "config.json").rename(folder / "adapter_config.json")
    assert "an adapter, not a full model; merge it into its base model" in refusal(folder)
    with pytest.raises(UnsupportedModelError):
        open_checkpoint(folder)


def test_a_merged_model_may_still_have_its_adapters_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": some_tensors("a")})
    (folder / "adapter_config.json").write_text("{}")
    assert list(open_checkpoint(folder).lazy_tensors) == ["a"]


def test_gguf_files_in_a_folder_are_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert "name the GGUF file itself: m.gguf" in refusal(tmp_path)


def test_tokenizer_files_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": some_tensors("a")})
    assert open_checkpoint(folder).generation == {} and open_checkpoint(folder).tokenizer_files == {}
    contents = {"tokenizer.json": '{"é": 1}', "chat_template.jinja": "{{ messages }}", "special_tokens_map.json": "{}"}
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert open_checkpoint(folder).tokenizer_files == contents
    assert open_checkpoint(folder).generation == {"temperature": 0.6}


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": some_tensors("a", "b")})
    whole = (folder / "model.safetensors").read_bytes()
    for size in range(len(whole)):
        (folder / "model.safetensors").write_bytes(whole[:size])
        assert "damaged safetensors file" in refusal(folder)


def test_no_changed_byte_ends_in_a_foreign_error(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": some_tensors("a", "b")})
    whole = (folder / "model.safetensors").read_bytes()
    for place in range(8 + struct.unpack("<Q", whole[:8])[0]):
        for value in (0, whole[place] ^ 1, whole[place] ^ 2, whole[place] ^ 0x80, ord("9"), 255):
            (folder / "model.safetensors").write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            load_or_refuse(folder)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4", "F6_E2M3", "C64", "U64", "nonsense"])
def test_no_kind_of_number_ends_in_a_foreign_error(tmp_path: Path, dtype: str) -> None:
    folder = write_folder(tmp_path, {})
    header = json.dumps({"a": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    load_or_refuse(folder)


def load_or_refuse(folder: Path) -> None:
    """Load everything; only an error of ours, in one line, may stop it."""
    try:
        loaded(folder)
    except ForetellError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
