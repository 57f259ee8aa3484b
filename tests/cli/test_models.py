"""foretell list, show, rm and ps: models on this machine, and running servers."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig, Qwen3_5Config, Qwen3_5MoeConfig, WhisperConfig

from foretell.cli.main import main, parse
from foretell.cli.ps import duration
from foretell.cli.show import kernels
from foretell.hub.catalog import BUILTINS, SMOLLM2, BuiltinModel
from foretell.hub.mapped_file import write_mapped
from foretell.hub.quantized.table import FORMAT_TABLE
from foretell.kernels.native.library import library
from foretell.models.families import BY_MODEL_TYPE, FAMILIES, family_table
from foretell.models.hf_config import from_hf
from foretell.server import registry
from foretell.server.registry import registered, registry_folder, running_servers
from tests.folder import write_tiny_folder
from tests.heads.assistants import write_pair
from tests.models.families import MODELS, make
from tests.quantized_folder import write_quantized_folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder with a built-in model and packed weights of it and of another model."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    for module in ("catalog", "stored"):
        monkeypatch.setattr(f"foretell.hub.{module}.cached_models", list)
    model = tmp_path / "home" / "models" / "smollm2-135m" / "smollm2-135m.gguf"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"GGUF")
    monkeypatch.setitem(BUILTINS, "smollm2-135m", BuiltinModel(**vars(SMOLLM2) | {"size": 4}))
    packed = tmp_path / "home" / "packed"
    write_mapped(packed / "smollm2-135m-int8-1", {"checkpoint": str(model)}, {})
    write_mapped(packed / "other-int8-2", {"checkpoint": str(tmp_path / "other.gguf")}, {})
    (packed / "damaged").write_bytes(b"no header")
    return tmp_path / "home"


def test_rm_names_what_it_removes_with_sizes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "rm", "smollm2-135m", "--yes")
    assert code == 0 and "removed" in out
    assert "model: " in err and "packed weights: " in err and err.count(" MB)") == 2
    assert not (home / "models" / "smollm2-135m").exists()
    assert sorted(file.name for file in (home / "packed").iterdir()) == ["damaged", "other-int8-2"]


def test_rm_packed_keeps_the_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "rm", "smollm2-135m", "--packed", "--yes", "--json")
    assert code == 0 and [Path(each).name for each in json.loads(out)["removed"]] == ["smollm2-135m-int8-1"]
    assert run(capsys, "rm", "--packed", "--yes")[0] == 0
    assert list((home / "packed").iterdir()) == [] and (home / "models" / "smollm2-135m").exists()
    assert "nothing to remove" in run(capsys, "rm", "--packed", "--yes")[1]


def test_rm_asks_first(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run(capsys, "rm", "smollm2-135m")
    assert code == 2 and err.endswith("add --yes: there is no terminal to ask\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    code, _, err = run(capsys, "rm", "smollm2-135m")
    assert code == 1 and "nothing was removed" in err and (home / "models" / "smollm2-135m").exists()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert run(capsys, "rm", "smollm2-135m")[0] == 0 and not (home / "models" / "smollm2-135m").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rm"], "model: is missing"),
        (["rm", "gemma3-270m", "--yes"], "foretell pull gemma3-270m"),
        (["rm", "no-such-owner/nothing", "--yes"], "foretell pull no-such-owner/nothing"),
        (["show", "nothing"], "there is no model 'nothing' on this machine"),
    ],
)
def test_a_model_that_is_not_here_is_one_line(
    words: list[str], message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2 and message in err and err.count("\n") == 1


def test_rm_never_removes_a_users_own_file(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_folder(tmp_path / "mine")
    code, _, err = run(capsys, "rm", str(folder), "--yes")
    assert code == 2 and "your own file" in err and folder.exists()


def test_rm_removes_a_repository_of_hugging_faces_cache(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretell.hub.catalog import LocalModel
    from foretell.hub.stored import stored_model

    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "1234"
    write_tiny_folder(snapshot)
    found = LocalModel("a/b", snapshot, 9, builtin=False, present=True)
    monkeypatch.setattr("foretell.hub.stored.cached_models", lambda: [found])
    stored = stored_model("A/b")
    assert stored.path == tmp_path / "hub" / "models--a--b" and stored.size > 0
    stored.remove()
    assert not stored.path.exists()


def test_show_describes_a_model_and_its_drafters(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", str(tiny_folder), "--json")
    found = json.loads(out)
    assert code == 0 and found["format"] == "safetensors" and found["not_served"] is None
    assert found["parameters"] > 0 and found["context"] > 0
    assert (found["family"], found["model_type"]) == (FAMILIES["llama"].title, "llama")
    assert {"ngram", "suffix", "self:int8"} <= {each["drafter"] for each in found["drafters"]}
    assert (found["on_cpu"], found["on_cuda"]) == ("native library", "Triton kernels")
    assert (found["format_on_cpu"], found["format_on_cuda"]) == ("float32", "bfloat16")
    words = run(capsys, "show", str(tiny_folder))[1]
    assert "native library, weights in float32" in words and "Triton kernels, weights in bfloat16" in words
    assert "parameters" in words and "suffix" in words and "native library" in words
    assert FAMILIES["llama"].title in words


def test_show_lists_the_error_of_each_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, plain = (str(each) for each in write_quantized_folder(tmp_path, "gptq symmetric"))
    found = json.loads(run(capsys, "show", folder, "--weights", "--json")[1])
    assert found["weights"] == "GPTQ int4 group 32" and found["not_served"] is None
    assert len(found["matrices"]) == 2 * 7 + 1
    for matrix in found["matrices"]:
        is_head = matrix["tensor"] == "lm_head.weight"
        assert matrix["stored"] == ("F32" if is_head else "int4 group 32")
        assert 0 < matrix["mean_error"] < (0.02 if is_head else 0.003) and 0 < matrix["max_error"] < 0.01
    exact = json.loads(run(capsys, "show", folder, "--weights", "-q", "none", "--json")[1])["matrices"]
    assert {(each["runs_as"], each["max_error"]) for each in exact} == {("float32", 0.0)}
    words = run(capsys, "show", plain, "--weights", "-q", "int8")[1]
    assert "model.layers.1.mlp.down_proj.weight" in words and "mean error" in words and "%" in words


def test_show_knows_the_modules_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = write_quantized_folder(tmp_path, "gptq symmetric", mtp=True)
    found = json.loads(run(capsys, "show", str(folder), "--json")[1])
    assert found["format_on_cpu"] == ("int4" if library() else "float32")
    assert found["drafters"][0]["drafter"] == "mtp"


def test_show_names_the_assistant_of_gemma_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, assistant = write_pair(tmp_path)
    found = json.loads(run(capsys, "show", str(target), "--json")[1])
    assert found["drafters"][0]["drafter"] == "assistant:FOLDER" and "torch" in found["on_cpu"]
    words = run(capsys, "show", str(assistant))[1]
    assert "drafts for Gemma 4" in words and "ngram" not in words


def test_show_says_why_a_model_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_folder(tmp_path / "moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    assert "mixture-of-experts" in json.loads(run(capsys, "show", str(folder), "--json")[1])["not_served"]


UNSERVED: dict[str, tuple[dict[str, Any], str]] = {
    "hybrid": (
        Qwen3_5Config().to_dict() | {"architectures": ["Qwen3_5ForConditionalGeneration"], "dtype": "bfloat16"},
        "layers of linear attention (Gated DeltaNet)",
    ),
    "mixture and hybrid": (Qwen3_5MoeConfig().to_dict() | {"dtype": "bfloat16"}, "Gated DeltaNet"),
    "vision": (LlavaConfig().to_dict() | {"dtype": "bfloat16"}, "vision or audio"),
    "audio": (WhisperConfig().to_dict() | {"dtype": "bfloat16"}, "encoder"),
    "nothing stated": ({"model_type": "mamba", "torch_dtype": "bfloat16"}, "recurrent or hybrid"),
    "type of the text": ({"model_type": "new_vl", "text_config": {"dtype": "bfloat16"}}, "vision or audio"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_show_describes_what_neither_server_nor_planner_knows(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, reason = UNSERVED[name]
    folder = write_tiny_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config))
    code, out, _ = run(capsys, "show", str(folder), "--json")
    found = json.loads(out)
    assert code == 0 and reason in found["not_served"]
    assert (found["model_type"], found["family"], found["drafters"]) == (config["model_type"], None, [])
    assert (found["format"], found["weights"]) == ("safetensors", "bfloat16")
    code, words, _ = run(capsys, "show", str(folder))
    assert code == 0 and reason in words and config["model_type"] in words and "bfloat16" in words


def test_show_describes_a_hybrid_in_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen35")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = json.loads(run(capsys, "show", str(tmp_path / "a.gguf"), "--json")[1])
    assert "Gated DeltaNet" in found["not_served"] and (found["model_type"], found["format"]) == ("qwen35", "GGUF")


def test_show_names_fused_tensors_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("phi3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, tmp_path / "model.safetensors")
    found = json.loads(run(capsys, "show", str(tmp_path), "--json")[1])
    assert f"tensor '{name}' has shape" in found["not_served"]


def test_list_has_models_and_packed_weights(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0 and "installed (default)" in out and "foretell pull gemma3-270m" in out
    assert "packed weights" in out and "foretell rm --packed" in out
    assert out == run(capsys, "models")[1]


def test_supported_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models", "--supported")
    assert code == 0 and all(family.title in out for family in FAMILIES.values())
    assert all(family.tested in out for family in FAMILIES.values())
    assert all(cell in out for row in FORMAT_TABLE for cell in row)
    found = json.loads(run(capsys, "models", "--supported", "--json")[1])
    assert {name for each in found for name in each["model_types"]} == BY_MODEL_TYPE.keys()


def test_supported_families_fit_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, out, _ = run(capsys, "models", "--supported")
    assert max(map(len, out.splitlines())) <= 80
    cells = [cell for row in (*family_table(), *FORMAT_TABLE) for cell in row]
    assert {word for cell in cells for word in cell.split()} <= set(out.split()), "cells are wrapped between words"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_says_what_runs_a_family(name: str) -> None:
    configs = [from_hf(config.to_dict()) for _, config in MODELS.values() if BY_MODEL_TYPE[config.model_type] == name]
    assert configs, "every family has a tiny model"
    for device in ("cpu", "cuda"):
        assert any(kernels(each, device).startswith("torch") for each in configs) == (device in FAMILIES[name].torch_on)


def test_ps_lists_servers_while_they_run(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no server is running" in run(capsys, "ps")[1]
    with registered("http://127.0.0.1:1", "tiny", ("suffix", "eagle")):
        code, out, _ = run(capsys, "ps")
        assert code == 0 and "http://127.0.0.1:1" in out and "suffix, eagle" in out and str(os.getpid()) in out
        assert "kill" not in out
        assert json.loads(run(capsys, "ps", "--json")[1])[0]["model"] == "tiny"
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert run(capsys, "ps")[1].splitlines()[-1] == "stop one with kill PID"
    assert running_servers() == []


def test_servers_in_containers_with_the_same_pid_are_both_listed(home: Path) -> None:
    with registered("http://127.0.0.1:1", "tiny", ()), registered("http://127.0.0.1:2", "tiny", ()):
        assert [server.url for server in running_servers()] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert list(registry_folder().iterdir()) == []


def test_an_unfinished_entry_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = registry.fcntl.flock

    def list_before_locking(file: object, how: int) -> None:
        if how & registry.fcntl.LOCK_EX:
            assert running_servers() == []
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(registry.fcntl, "flock", list_before_locking)
    with registered("http://127.0.0.1:1", "tiny", ()):
        assert len(running_servers()) == 1


def hold_and_die() -> None:
    with registered("http://127.0.0.1:2", "tiny", ()):
        os._exit(1)


def test_a_server_that_was_killed_is_not_listed(home: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=hold_and_die)
    child.start()
    child.join()
    assert len(list(registry_folder().iterdir())) == 1
    assert running_servers() == [] and list(registry_folder().iterdir()) == []


def test_a_server_runs_where_the_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_HOME", "/dev/null/no")
    with registered("http://127.0.0.1:3", "tiny", ()):
        assert running_servers() == []


def test_durations_have_two_units() -> None:
    assert [duration(each) for each in (0, 59, 61, 7325, 90_000)] == ["0s", "59s", "1m 1s", "2h 2m", "1d 1h"]


def test_run_generates_with_a_prompt_and_chats_without(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "run", str(tiny_folder), "The quick", "brown", "--max-tokens", "3", "--json")
    assert code == 0 and json.loads(out)["usage"]["completion_tokens"] <= 3


def test_run_refuses_flags_of_one_prompt_in_a_chat(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    code, _, err = run(capsys, "run", str(tiny_folder), "--raw")
    assert code == 2 and "is not for a chat" in err


@pytest.mark.parametrize("words", [["run", "a", "hi"], ["chat", "a"], ["serve", "a"]])
def test_a_model_is_named_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *words, "-m", "b")
    assert code == 2 and "model: is given twice, as 'a' and as 'b'" in err
    assert parse([*words, "--model", "a"]).model == "a", "the same name twice is no contradiction"


def test_run_offers_no_second_way_to_name_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    assert "--model " not in capsys.readouterr().out
