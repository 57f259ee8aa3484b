"""Checkpoints in several files, of every family: whole, with a file missing, and with files of two models mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.errors import ModelError
from foretell.hub import open_checkpoint
from foretell.models.families import FAMILIES
from foretell.models.load import load_model

from . import families

INDEX = "model.safetensors.index.json"


def save(name: str, folder: Path, size: str = "12KB") -> list[Path]:
    """Write a model in files of at most this size, and return those of them that have layers."""
    families.make(name).save_pretrained(folder, max_shard_size=size)
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    return sorted({folder / file for tensor, file in files.items() if "layers" in tensor})


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(open_checkpoint(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_family_is_here() -> None:
    assert families.ONE_EACH.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", families.ONE_EACH)
def test_files_together_are_the_model(family: str, tmp_path: Path) -> None:
    name = families.ONE_EACH[family]
    files = save(name, tmp_path / "several")
    assert len(files) > 2
    families.save(name, tmp_path / "one")
    several, one = (
        dict(load_model(open_checkpoint(tmp_path / each)).named_parameters()) for each in ("several", "one")
    )
    assert several.keys() == one.keys() and all(torch.equal(several[key], one[key]) for key in one)
    files[0].rename(tmp_path / "elsewhere")
    assert files[0].name in refusal(tmp_path / "several")


@pytest.mark.parametrize("family", families.ONE_EACH)
def test_a_file_of_another_size_is_named_by_its_tensor(family: str, tmp_path: Path) -> None:
    """As if one file were of another size of the same model: the same names, other shapes."""
    files = save(families.ONE_EACH[family], tmp_path)
    tensors = load_file(files[1])
    matrices = [name for name, values in tensors.items() if values.dim() > 1]
    save_file(
        {name: values[..., :-1].contiguous() if name in matrices else values for name, values in tensors.items()},
        files[1],
    )
    line = refusal(tmp_path)
    assert any(repr(name) in line for name in matrices) and "has shape" in line


@pytest.mark.parametrize("family", families.ONE_EACH)
def test_files_may_differ_in_their_type(family: str, tmp_path: Path) -> None:
    files = save(families.ONE_EACH[family], tmp_path)
    for file, dtype in zip(files, (torch.bfloat16, torch.float16), strict=False):
        save_file({name: values.to(dtype) for name, values in load_file(file).items()}, file)
    loaded = load_model(open_checkpoint(tmp_path))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_a_file_of_another_family_is_named_by_its_tensor(tmp_path: Path) -> None:
    files = save("gemma3", tmp_path / "gemma3")
    others = save("llama, heads of another size", tmp_path / "llama")
    shutil.copy(files[0], others[0])
    assert f"{others[0].name}: lacks tensor 'model.layers.0." in refusal(tmp_path / "llama")
