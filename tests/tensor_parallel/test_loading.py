"""A rank reads its shard of a file and no more, and the shards are the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.hub import Checkpoint, LazyTensor, open_checkpoint
from foretell.models.decoder import Decoder
from foretell.models.load import load_model
from foretell.models.sharding import Shard
from foretell.models.weights import map_parameters
from tests.models import families
from tests.models.gguf_files import write_gguf

MODELS = ["llama", "qwen2", "gemma3", "phi3, long"]


@pytest.fixture(params=["folder", "gguf"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def written(name: str, kind: str, path: Path) -> Checkpoint:
    model: Any = families.make(next(each for each in families.MODELS if each.startswith(name)))
    if kind == "gguf":
        write_gguf(model, path / "model.gguf")
        return open_checkpoint(path / "model.gguf")
    model.save_pretrained(path)
    return open_checkpoint(path)


def put_together(parts: list[Decoder], is_gguf: bool) -> dict[str, torch.Tensor]:
    """Return the tensors that the shards were cut from; replicated ones must be equal."""
    first, found = parts[0], dict[str, torch.Tensor]()
    whole = {name: slot.rows for name, slot in map_parameters(Decoder(first.config), is_gguf).items()}
    for name, rows in whole.items():
        rows.fill_(float("nan"))
        for part in parts:
            slot = map_parameters(part, is_gguf)[name]
            if slot.source.columns is not None:
                rows[:, slot.source.columns.start : slot.source.columns.stop] = slot.rows
            elif slot.source.rows is not None and len(slot.source.rows):
                rows[slot.source.rows.start : slot.source.rows.stop] = slot.rows
            elif slot.source.rows is None:
                rows.copy_(slot.rows)
        found[name] = rows
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_shards_are_the_whole(name: str, kind: str, size: int, tmp_path: Path) -> None:
    checkpoint, is_gguf = written(name, kind, tmp_path), kind == "gguf"
    whole = {name: slot.rows for name, slot in map_parameters(load_model(checkpoint), is_gguf).items()}
    with torch.inference_mode():
        parts = [load_model(checkpoint, shard=shard) for shard in Shard(0, size).all_ranks]
        found = put_together(parts, is_gguf)
    assert found.keys() == whole.keys()
    for tensor in whole:
        assert torch.equal(found[tensor], whole[tensor]), tensor


def test_no_rank_reads_the_rest(kind: str, tmp_path: Path) -> None:
    """By rows where a tensor is cut by rows; where it is cut by columns, a few rows at a time."""
    checkpoint, read = written("llama", kind, tmp_path), dict[str, list[tuple[int, int]]]()

    def watched(tensor: LazyTensor) -> LazyTensor:
        def load() -> torch.Tensor:
            read.setdefault(tensor.name, []).append((0, tensor.shape[0]))
            return tensor.load()

        def rows(start: int, stop: int) -> torch.Tensor:
            read.setdefault(tensor.name, []).append((start, stop))
            return tensor.rows(start, stop)

        return LazyTensor(tensor.name, tensor.shape, load, rows)

    lazy = {name: watched(tensor) for name, tensor in checkpoint.tensors()}
    load_model(replace(checkpoint, lazy_tensors=lazy), shard=Shard(1, 2))
    for name, ranges in read.items():
        rows = checkpoint.lazy_tensors[name].shape[0]
        cut_by_rows = any(part in name for part in ("q_proj", "k_proj", "gate", "up_proj", "embed", "attn_q", "attn_k"))
        if cut_by_rows and "norm" not in name:
            assert sum(stop - start for start, stop in ranges) <= rows // 2 + 32, name
    assert any("gate" in name for name in read)
