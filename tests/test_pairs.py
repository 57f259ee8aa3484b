"""foretell pairs and foretell check-pair: known pairs, and compatibility by config and tokenizer."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers

from foretell.build.draft_compat import check_draft_compat, check_model_names, look_up, parameters
from foretell.build.model_source import no_progress, open_model
from foretell.cli.common import Command
from foretell.cli.main import main
from foretell.cli.pairs import CHECK_PAIR, PAIRS
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import ModelError
from foretell.hub.catalog import BUILTINS, LocalModel
from foretell.hub.pairs import FOR_ANY, Suggestion, find_target, is_installed, known_targets
from foretell.models.draft_heads.loading import SHIPPED
from foretell.models.hf_config import from_hf
from foretell.models.load import meta_model
from tests.folder import write_tiny_folder
from tests.laws.test_layers import loaded_by
from tests.models.families import MODELS
from tests.tokenizer.examples import byte_level_json, metaspace_json

KINDS = {"model", "eagle", "medusa", "mtp", "assistant", "block", "distilled"}
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def run(command: Command, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    code = command.run(parser.parse_args(words))
    return code, capsys.readouterr().out


def test_every_known_target_and_draft_is_complete() -> None:
    targets = known_targets()
    assert len({target.id for target in targets}) == len(targets) > 40
    for target in targets:
        assert ID.fullmatch(target.id) or target.id in BUILTINS, target.id
        assert 0 < target.billions < 1000
        assert target.family
        assert target.drafts, target.id
        for draft in target.drafts:
            assert draft.kind in KINDS
            part_of_target = draft.id == "" and (draft.kind == "mtp" or target.id in BUILTINS)
            assert ID.fullmatch(draft.id) or draft.id in BUILTINS or part_of_target, draft.id
            assert draft.billions is None or 0 < draft.billions < target.billions, (target.id, draft.id)
            assert draft.billions is not None or draft.kind != "model", "a draft model's size is known"


def test_common_families_and_built_in_models_are_known() -> None:
    families = {target.family for target in known_targets()}
    assert families >= {
        "Llama 3",
        "Qwen 2.5",
        "Qwen 3",
        "Mistral",
        "Gemma 3",
        "Gemma 4",
        "SmolLM2",
        "DeepSeek",
        "Vicuna",
        "gpt-oss",
    }
    named = {target.id for target in known_targets()} | {d.id for target in known_targets() for d in target.drafts}
    assert named >= set(BUILTINS)


def test_drafters_for_any_model_are_accepted_by_the_option() -> None:
    offered = SpeculationConfig.__dataclass_fields__["drafter"].metadata["help"]
    for name in set(FOR_ANY) - {"prediction"}:
        assert name in offered, name


NAMES = {
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B-AWQ": "Qwen/Qwen3-8B",
    "unsloth/Meta-Llama-3.1-8B-Instruct-GGUF/Llama.gguf": "meta-llama/Llama-3.1-8B-Instruct",
    "/models/gemma-3-27b-it/": "google/gemma-3-27b-it",
    "unsloth/gemma-4-E2B-it-GGUF:Q4_K_M": "google/gemma-4-E2B-it",
    "bartowski/x:Qwen2.5-Coder-7B-Instruct-Q4_K_M.gguf": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "someone/Qwen3-4Bit": None,
    "unknown/model": None,
}


@pytest.mark.parametrize(("name", "target"), NAMES.items())
def test_a_target_is_known_by_any_of_its_names(name: str, target: str | None) -> None:
    found = find_target(name)
    assert (found and found.id) == target


def test_pairs_lists_drafts_and_what_works_for_any(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(PAIRS, capsys, "gemma3-270m")
    assert code == 0
    assert "model:smollm2-135m" in out
    assert all(f"  {name}" in out for name in FOR_ANY)
    code, out = run(PAIRS, capsys)
    assert code == 0
    assert all(target.id in out for target in known_targets())


def test_pairs_of_an_unknown_model_still_lists_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(PAIRS, capsys, "unknown/model")
    assert code == 0
    assert "no draft model or head is known for unknown/model" in out
    assert "ngram" in out
    assert "did you mean Qwen/Qwen3-8B?" in run(PAIRS, capsys, "Qwen/Qwen3_8B")[1]
    code, out = run(PAIRS, capsys, "unknown/model", "--json")
    assert (code, json.loads(out)["known"]) == (0, [])
    assert set(json.loads(out)["for_any"]) == set(FOR_ANY)


def test_the_heads_that_ship_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    target = find_target("smollm2-135m")
    shipped = {folder.name for folder in (SHIPPED / "smollm2-135m").iterdir() if folder.is_dir()}
    assert target is not None and {draft.kind for draft in target.drafts} == shipped
    out = run(PAIRS, capsys, "smollm2-135m")[1]
    assert all(f"  {kind} " in out for kind in shipped) and out.count("ships with the package") == len(shipped)


def test_the_names_of_the_planner_are_found() -> None:
    names = {"llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct", "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.2"}
    names |= {"gemma-3-4b": "google/gemma-3-4b-it", "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B"}
    assert {name: found.id for name in names if (found := find_target(name)) is not None} == names
    assert find_target("other/llama-3.1-8b") is None, "of an owner, it may be another model"


def test_targets_that_cannot_be_served_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    marked = {target.id for target in known_targets() if target.not_served}
    assert marked >= {"deepseek-ai/DeepSeek-R1", "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B"}
    assert not marked & {"Qwen/Qwen3-8B", "google/gemma-3-4b-it", "google/gemma-4-31B-it"}
    assert "not served here: mixture of experts" in run(PAIRS, capsys, "openai/gpt-oss-20b")[1]
    assert run(PAIRS, capsys)[1].count("not served here") == len(marked)


def test_a_part_of_a_name_finds_the_targets_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    several = run(PAIRS, capsys, "GPT-OSS")[1]
    assert "openai/gpt-oss-20b" in several and "openai/gpt-oss-120b" in several and "Qwen" not in several
    assert run(PAIRS, capsys, "gpt-oss-20")[1].startswith("openai/gpt-oss-20b, 20.9B")
    assert "no draft model or head is known for zzz" in run(PAIRS, capsys, "zzz")[1]


def test_a_draft_is_local_only_with_its_weights(tmp_path: Path) -> None:
    draft, cached = Suggestion("model", "a/b", 1.0), LocalModel("a/b", tmp_path, 9, builtin=False, present=True)
    assert not is_installed(draft, [cached])
    (tmp_path / "model.safetensors").touch()
    assert is_installed(draft, [cached])
    assert not is_installed(Suggestion("model", "a/c", 1.0), [cached])


def test_pairs_needs_no_torch() -> None:
    code = "from foretell.hub.pairs import find_target; from foretell.cli.pairs import PAIRS; find_target('x')"
    assert "torch" not in loaded_by(code)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "target")


def model_folder(folder: Path, tokenizer: str | None = None, **config: Any) -> Path:
    """Write a model without weights."""
    write_tiny_folder(folder)
    (folder / "model.safetensors").unlink()
    values = json.loads((folder / "config.json").read_text())
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
        values["vocab_size"] = Backend.from_str(tokenizer).get_vocab_size()
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def lower_case() -> str:
    backend = Backend.from_str(byte_level_json())
    backend.normalizer = normalizers.Lowercase()
    return str(backend.to_str())


def opaque() -> str:
    backend = Backend.from_str(metaspace_json())
    backend.normalizer, backend.decoder = None, decoders.Metaspace()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return str(backend.to_str())


def test_compatibility_is_decided_by_config_and_tokenizer(target: Path, tmp_path: Path) -> None:
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    drafts = {
        "same": model_folder(tmp_path / "same"),
        "renamed": model_folder(
            tmp_path / "renamed", (target / "tokenizer.json").read_text().replace("im_start", "go")
        ),
        "padded": model_folder(tmp_path / "padded", vocab_size=size + 64),
        "short": model_folder(tmp_path / "short", vocab_size=size - 8),
        "other": model_folder(tmp_path / "other", metaspace_json()),
        "lower": model_folder(tmp_path / "lower", lower_case()),
        "opaque": model_folder(tmp_path / "opaque", opaque()),
        "experts": model_folder(tmp_path / "experts", model_type="mixtral"),
    }
    found = {name: check_model_names(str(target), str(draft), no_progress) for name, draft in drafts.items()}
    assert {name: compat.kind for name, compat in found.items()} == {
        "same": "same",
        "renamed": "same",
        "padded": "same",
        "short": "tokens",
        "other": "strings",
        "lower": "refused",
        "opaque": "refused",
        "experts": "refused",
    }
    assert any("differ by padding alone" in note for note in found["padded"].notes)
    assert "do not keep text" in found["lower"].message
    assert "cannot be read one by one" in found["opaque"].message
    assert "mixture-of-experts" in found["experts"].message
    assert "first at token" in found["other"].message
    assert found["other"].vocab_map is not None


def test_notes_tell_the_relative_size(target: Path, tmp_path: Path) -> None:
    short = look_up(str(model_folder(tmp_path / "short", max_position_embeddings=64)), no_progress)
    notes = " ".join(check_draft_compat(look_up(str(target), no_progress), short).notes)
    assert "cannot pay" in notes
    assert "takes 64 tokens and the target 128" in notes
    small = look_up(str(model_folder(tmp_path / "small", num_hidden_layers=1)), no_progress)
    found = check_draft_compat(look_up(str(target), no_progress), small)
    assert found.weight_ratio is not None
    assert 0.5 < found.weight_ratio < 1
    assert "will rarely pay" in found.notes[0]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_correctly(name: str) -> None:
    config = from_hf(MODELS[name][1].to_dict())
    assert parameters(config) == sum(weight.numel() for weight in meta_model(config, torch.float32).parameters())


def test_check_pair_sets_the_exit_code(capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path) -> None:
    draft, refused = model_folder(tmp_path / "draft", metaspace_json()), model_folder(tmp_path / "lower", lower_case())
    code, out = run(CHECK_PAIR, capsys, str(target), str(draft))
    assert code == 0
    assert out.startswith("works, with another tokenizer")
    assert f"--drafter model:{draft}" in out
    code, out = run(CHECK_PAIR, capsys, str(target), str(refused))
    assert code == 1
    assert out.startswith("will not work")
    assert "use it" not in out
    code, out = run(CHECK_PAIR, capsys, str(target), str(target))
    assert code == 0 and out.startswith("works: same tokenizer, but it cannot pay off\n")
    assert "use it" not in out and f"foretell pairs {target} lists smaller ones" in out
    code, out = run(CHECK_PAIR, capsys, str(target), str(target), "--json")
    result = json.loads(out)
    assert (code, result["kind"], result["agreement"], result["weight_ratio"]) == (0, "same", 1.0, 1.0)


def test_unknown_model_names_are_usage_errors(target: Path, tmp_path: Path) -> None:
    assert main(["check-pair", "no such model", str(target)]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["check-pair", str(target)])
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_model_names(str(target), str(tmp_path), no_progress)


def test_weights_of_a_hugging_face_id_are_not_fetched(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def snapshot(repo: str, allow_patterns: list[str], ignore_patterns: list[str], revision: str | None) -> str:
        fetched.extend([repo, *allow_patterns])
        return str(target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert check_model_names("owner/model", str(target), no_progress).kind == "same"
    assert fetched[0] == "owner/model"
    assert "config.json" in fetched
    assert not [pattern for pattern in fetched if "safetensors" in pattern and not pattern.endswith(".json")]


@pytest.mark.weights
def test_the_built_in_models_are_compatible_by_tokens() -> None:
    opened = [open_model(name, EngineConfig(model=name), no_progress) for name in ("gemma3-270m", "smollm2-135m")]
    found = check_draft_compat(*opened)
    assert (found.kind, found.works) == ("tokens", True)
    assert found.agreement is not None
    assert found.agreement > 0.9
