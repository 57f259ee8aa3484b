"""Packed weights on disk: the same bytes as from the checkpoint, or none at all."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.build.model_source import CacheSize, ModelSource, no_progress, open_model
from foretell.config import EngineConfig
from foretell.hub.catalog import packed_folder
from foretell.hub.checkpoint import CONFIG as CONFIG_FILE
from foretell.hub.checkpoint import WEIGHTS
from foretell.hub.mapped_file import read_mapped, write_mapped
from foretell.kernels.native.huge_pages import in_huge_pages
from foretell.kernels.native.library import library
from foretell.kernels.quant import QuantFormat
from foretell.llm import LLM
from foretell.models import packed_weights_cache as kept
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.packed_weights_cache import packed_tensors, remove_stale_files, restore_model
from foretell.models.quantize import quantize_weights
from foretell.models.tied_weights import share_target_weights
from foretell.sampling_params import SamplingParams
from tests.models.test_quantize import BIASED
from tests.tiny import CONFIG, tiny_decoder

ROOM = CacheSize(pages=8, page_size=16, context=64)
FORMATS: list[QuantFormat | None] = [None, "int8", "int4"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, in which the smallest model is kept."""
    if library() is None:
        pytest.skip("no C++ compiler is here")
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(kept, "MIN_CACHED_BYTES", 0)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))


def opened(folder: Path, quantization: str = "int8") -> ModelSource:
    return open_model(str(folder), EngineConfig(quantization=quantization), no_progress)


def start(model: ModelSource) -> tuple[bool, dict[str, bytes]]:
    """Whether a start took what was kept, and what it runs with."""
    loaded = model.load_packed()
    was_kept = loaded.is_packed
    return was_kept, all_bytes(model.make_runner(loaded, ROOM).model)


def all_bytes(model: Decoder) -> dict[str, bytes]:
    return {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in packed_tensors(model)
    }


def only_file() -> Path:
    (file,) = packed_folder().iterdir()
    return file


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_second_start_takes_the_same_bytes_from_disk(folder: Path, quantization: str) -> None:
    first, second = (start(opened(folder, quantization)) for _ in range(2))
    assert (first[0], second[0]) == (False, True)
    assert first[1] == second[1]


def untie(folder: Path) -> None:
    """Give the model an output matrix of its own."""
    weights, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG_FILE).read_text())
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, folder / WEIGHTS)
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "tie_word_embeddings": False}))


def test_heads_borrow_the_same_of_what_was_kept(folder: Path) -> None:
    untie(folder)
    model = opened(folder)
    start(model)
    packed, floats = model.load_packed(), model.load()
    assert floats.can_share_weights and not packed.can_share_weights
    lent, defined = share_target_weights(model.checkpoint, packed), share_target_weights(model.checkpoint, floats)
    for mine, theirs in zip(
        (lent.embed, lent.output, lent.norm), (defined.embed, defined.output, defined.norm), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", [CONFIG, BIASED])
def test_every_part_comes_back_where_kernels_want_it(
    config: ModelConfig, format: QuantFormat | None, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "in_huge_pages", lambda _: large)
    native, made = library(), tiny_decoder(config=config)
    assert native is not None
    made = made if format is None else quantize_weights(made, format)
    made.prepare(64)
    write_mapped(tmp_path / "file", {}, dict(packed_tensors(made)))
    found = restore_model(native, config, format, read_mapped(tmp_path / "file", {}))
    assert all_bytes(found) == all_bytes(made)
    assert {name: type(module) for name, module in found.named_modules()} == {
        name: type(module) for name, module in made.named_modules()
    }
    assert all(tensor.data_ptr() % 64 == 0 for _, tensor in packed_tensors(found))
    states = torch.randn(3, config.width)
    assert torch.equal(found.logits(states), made.logits(states))


def test_a_tied_embedding_is_kept_once(folder: Path) -> None:
    model = opened(folder).load()
    if not model.config.tied:
        model = tiny_decoder()
    assert model.config.tied
    names = {name for name, _ in packed_tensors(quantize_weights(model, "int8"))}
    assert {name for name in names if "embed" in name or "head" in name} == {"embed", "head.values", "head.scales"}


def flipped(at: float) -> Callable[[Path], None]:
    """One bit, so far into the file."""

    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(at * len(data))] ^= 4
        file.write_bytes(data)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "first byte": flipped(0.0),
    "header": flipped(0.02),
    "early": flipped(0.3),
    "half": flipped(0.5),
    "late": flipped(0.95),
    "cut off": lambda file: os.truncate(file, file.stat().st_size // 2),
    "a bit short": lambda file: os.truncate(file, file.stat().st_size - 64),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 64),
    "empty": lambda file: os.truncate(file, 0),
    "another's": lambda file: file.write_bytes(b"GGUF" * 1000) and None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_and_made_anew(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    model = opened(folder)
    _, bytes_before = start(model)
    DAMAGES[damage](only_file())
    with caplog.at_level(logging.INFO, "foretell"):
        assert start(model) == (False, bytes_before)
    assert len(caplog.messages) == 1 and "written again" in caplog.messages[0]
    assert start(model) == (True, bytes_before)


def test_tensors_that_do_not_fit_are_logged_with_the_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cause may be a bug of the code, not of the file."""
    model = opened(folder)
    _, bytes_before = start(model)
    monkeypatch.setattr(kept, "restore_model", lambda *_: {}["embed"])
    assert start(model) == (False, bytes_before)
    (record,) = caplog.records
    assert "does not fit the model" in record.getMessage() and record.exc_info and record.exc_info[0] is KeyError


def test_another_checkpoint_or_other_code_makes_it_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(opened(folder))
    os.utime(next(folder.glob("*.safetensors")), (1, 1))
    assert not start(opened(folder))[0]
    monkeypatch.setattr(kept, "_made_by", lambda: "tomorrow")
    assert not start(opened(folder))[0]
    assert start(opened(folder))[0] and only_file()


@pytest.mark.parametrize("full", [True, False])
def test_where_nothing_can_be_kept_the_model_runs_all_the_same(
    folder: Path, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if full:
        monkeypatch.setattr(Path, "replace", fail)
    else:
        (tmp_path / "home").write_text("no folder")
    assert not start(opened(folder))[0]
    assert len(caplog.messages) >= 1 and "cannot be written" in caplog.messages[-1]
    assert not full or not list(packed_folder().iterdir()), "nothing is left of it"


def test_several_may_start_at_once(folder: Path) -> None:
    found: list[tuple[bool, dict[str, bytes]]] = []
    starts = [threading.Thread(target=lambda: found.append(start(opened(folder)))) for _ in range(4)]
    for each in starts:
        each.start()
    for each in starts:
        each.join()
    assert len(found) == 4 and all(bytes_ == found[0][1] for _, bytes_ in found)
    assert start(opened(folder)) == (True, found[0][1]) and only_file()


def test_unused_cache_files_are_deleted(folder: Path) -> None:
    start(opened(folder))
    old, young = packed_folder() / "making-old", packed_folder() / "making-young"
    for each in (old, young):
        each.mkdir()
    os.utime(old, (1, 1))
    remove_stale_files(packed_folder())
    assert young.exists() and not old.exists() and len(list(packed_folder().iterdir())) == 2
    shutil.rmtree(folder)
    remove_stale_files(packed_folder())
    assert list(packed_folder().iterdir()) == [young]


def test_small_models_are_not_kept_and_who_says_no_is_heeded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(open_model(str(folder), EngineConfig(keep_packed=False), no_progress))
    monkeypatch.undo()
    monkeypatch.setenv("FORETELL_HOME", str(folder / "home"))
    start(opened(folder))
    assert not packed_folder().exists()


@pytest.mark.parametrize("drafter", ["none", "self:int4"])
def test_texts_are_the_same_from_disk(folder: Path, drafter: str) -> None:
    """A copy in fewer bits is made of floats, which a kept model does not have."""
    outputs = [
        LLM(folder, drafter=drafter, quantization="int8", quiet=True).generate(
            "The quick", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )[0]
        for _ in range(2)
    ]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids and only_file()


@pytest.mark.parametrize(("large", "said"), [(900, True), (400, False)])
def test_whether_pages_are_large_is_read_from_the_system(large: int, said: bool, tmp_path: Path) -> None:
    tensor = torch.zeros(4)
    around = f"{tensor.data_ptr() - 64:x}-{tensor.data_ptr() + 64:x}"
    (tmp_path / "smaps").write_text(
        "0-10 r--p 00000000 00:00 0\nRss:    7 kB\nFilePmdMapped:    0 kB\n"
        f"{around} rw-p 00000000 00:00 0  /file\nRss:    1000 kB\nFilePmdMapped:    {large} kB\n"
    )
    assert in_huge_pages(tensor, tmp_path) is said
    assert in_huge_pages(tensor, tmp_path / "none")
