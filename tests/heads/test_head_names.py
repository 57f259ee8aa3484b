"""Heads by name: shipped with the package, in a folder, or a folder alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretell import LLM, SamplingParams
from foretell.build import draft_heads as heads_module
from foretell.config import SpeculationConfig
from foretell.draft import drafter_names, heads_wanted, models_wanted
from foretell.errors import ForetellError, ModelError, RequestError
from foretell.hub import open_checkpoint
from foretell.models.draft_heads import (
    BlockConfig,
    DistilledConfig,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    TargetWeights,
    make_head,
    write_head,
)
from foretell.models.draft_heads import loading as opening
from foretell.models.draft_heads.layer import init_weights
from foretell.models.hf_config import read_config
from foretell.models.load import load_model
from foretell.vllm_config import speculation_from_vllm
from tests.folder import write_tiny_folder
from tests.heads.toy_training import LAYER

PARAMS = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = ["The quick brown fox", "She sells sea shells by the sea shore. She sells"]
KINDS = ("eagle", "block", "medusa")


def write_heads(target: Path, into: Path) -> None:
    """A random head of each kind."""
    vocab = read_config(open_checkpoint(target)).vocab
    configs: list[HeadConfig] = [
        EagleConfig(LAYER, vocab, 32, (0, 1, 2), draft_vocab=100, fc_norm=True, norm_output=True),
        BlockConfig(LAYER, vocab, 32, (1, 2), block=4, markov_rank=4, confidence=True),
        MedusaConfig(LAYER, vocab, 32, (2,), target_norm=True),
    ]
    for config in configs:
        head = make_head(config)
        init_weights(head, torch.Generator().manual_seed(0), spread=0.2)
        if config.draft_vocab is not None:
            head.draft_ids.copy_(torch.arange(100) * 2)
        write_head(head, into / config.kind)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    write_heads(tiny_folder, folder)
    return folder


def tokens(llm: LLM) -> list[list[int]]:
    return [list(text.outputs[0].token_ids) for text in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> list[list[int]]:
    return tokens(LLM(tiny_folder, drafter="none", quiet=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_a_folder_serves(kind: str, heads: Path, tiny_folder: Path, plain: list[list[int]]) -> None:
    llm = LLM(tiny_folder, drafter=f"{kind}:{heads / kind}", num_speculative_tokens=3, quiet=True)
    assert tokens(llm) == plain
    assert llm.engine.stats.speculation.by_drafter.keys() == {f"{kind}:{heads / kind}"}
    assert llm.engine.drafter.drafters[f"{kind}:{heads / kind}"].traits.weight_bytes > 0


@pytest.mark.parametrize(("accuracy", "believed"), [((), None), ((0.7, 0.5), 0.7), ((0.0,), 0.1)])
@pytest.mark.parametrize("kind", ["eagle", "distilled"])
def test_the_prior_acceptance_is_the_accuracy_of_training(
    kind: str, accuracy: tuple[float, ...], believed: float | None, tmp_path: Path, tiny_folder: Path
) -> None:
    vocab = read_config(open_checkpoint(tiny_folder)).vocab
    config: HeadConfig = DistilledConfig(LAYER, vocab, 32, (0,), layers=1, accuracy=accuracy)
    if kind == "eagle":
        config = EagleConfig(LAYER, vocab, 32, (0, 1, 2), fc_norm=True, accuracy=accuracy)
    head = make_head(config)
    init_weights(head, torch.Generator().manual_seed(0))
    write_head(head, tmp_path)
    drafter = LLM(tiny_folder, drafter=f"{kind}:{tmp_path}", quiet=True).engine.drafter.drafters[f"{kind}:{tmp_path}"]
    assert (
        drafter.traits.prior_acceptance == believed if believed is not None else drafter.traits.prior_acceptance > 0.5
    )


def test_several_heads_and_others_serve_together(heads: Path, tiny_folder: Path, plain: list[list[int]]) -> None:
    names = ",".join(["ngram", *(str(heads / kind) for kind in KINDS)])
    llm = LLM(tiny_folder, drafter=names, max_draft=4, quiet=True)
    assert llm.engine.runner.hidden_layers == (0, 1, 2)
    assert tokens(llm) == plain


def test_a_folder_is_recognized_by_its_content(heads: Path, tiny_folder: Path) -> None:
    folder = heads / "block"
    for name in (str(folder), f"model:{folder}"):
        config = SpeculationConfig(drafter=name)
        assert drafter_names(config) == heads_wanted(config) == (f"block:{folder}",) and not models_wanted(config)
    assert models_wanted(SpeculationConfig(drafter=f"model:{tiny_folder}")) == (str(tiny_folder),)
    theirs = speculation_from_vllm({"method": "eagle3", "model": str(heads / "eagle")})
    assert drafter_names(theirs) == (f"eagle:{heads / 'eagle'}",)


def test_a_name_alone_means_the_shipped_head(
    heads: Path, tiny_folder: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="foretell train eagle"):
        LLM(tiny_folder, drafter="eagle", quiet=True)
    monkeypatch.setattr(opening, "SHIPPED", heads.parent)
    with pytest.raises(RequestError, match="no distilled ships with the package for smollm2-135m"):
        opening.shipped_head("smollm2-135m", "distilled")
    assert opening.shipped_head(heads.name, "eagle") == heads / "eagle"


def test_shipped_heads_are_small_and_have_a_card() -> None:
    folders = sorted(each for each in (opening.SHIPPED / "smollm2-135m").iterdir() if each.is_dir())
    assert [each.name for each in folders] == ["block", "distilled", "eagle", "medusa"]
    for folder in folders:
        assert opening.head_kind(folder) == folder.name and "Licence: Apache-2.0" in (folder / "README.md").read_text()
    files = [each for each in opening.SHIPPED.rglob("*") if each.is_file()]
    assert sum(each.stat().st_size for each in files) <= 30_000_000
    assert max(each.stat().st_size for each in files) <= 16 << 20


def test_pickled_weights_raise_an_error_with_the_conversion(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"convert it: python .*pytorch_model.bin"):
        LLM(tiny_folder, drafter=str(tmp_path), quiet=True)


def test_a_head_for_another_target_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    write_head(make_head(EagleConfig(LAYER, 77, 32, (1,), target="another model")), tmp_path)
    with pytest.raises(ForetellError, match="another model and does not fit"):
        LLM(tiny_folder, drafter=str(tmp_path), quiet=True)


def test_a_distilled_model_needs_no_tokenizer_of_its_own(
    tmp_path: Path, tiny_folder: Path, plain: list[list[int]]
) -> None:
    folder = write_tiny_folder(tmp_path / "small", seed=4)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    llm = LLM(tiny_folder, drafter=f"distilled:{folder}", num_speculative_tokens=2, quiet=True)
    assert tokens(llm) == plain
    assert llm.engine.stats.speculation.by_drafter.keys() == {f"distilled:{folder}"}


def test_auto_uses_the_shipped_heads_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_module, "SHIPPED", tmp_path)
    auto, named = SpeculationConfig(), SpeculationConfig(drafter="ngram")
    assert heads_module.with_shipped_heads(auto, "some-model") == auto
    (tmp_path / "some-model").mkdir()
    (tmp_path / "some-model" / "auto").write_text("eagle block\n")
    assert heads_module.with_shipped_heads(auto, "some-model").drafter == "auto,eagle,block"
    assert heads_module.with_shipped_heads(named, "some-model") == named
    assert heads_module.with_shipped_heads(auto, "../some-model") == auto


def test_the_targets_embedding_is_shared(tmp_path: Path, tiny_folder: Path) -> None:
    target = load_model(open_checkpoint(tiny_folder))
    config = EagleConfig(LAYER, target.config.vocab, 32, (1,), own_embed=True)
    head = make_head(config)
    init_weights(head, torch.Generator().manual_seed(0))
    assert head.embed is not None
    for same in (True, False):
        if same:
            head.embed.data.copy_(target.embed.data)
        else:
            head.embed.data[3, 3] += 1
        write_head(head, tmp_path / str(same))
        opened = opening.open_head(tmp_path / str(same), target.config)
        found = opened.load(TargetWeights.of(target), torch.float32, 64)
        assert (found.embed is None) == same and found.embedding.equal(head.embed)
