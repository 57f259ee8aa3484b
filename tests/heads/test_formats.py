"""Public head formats: the same logits as another program's, and the tensor names of each format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretell.errors import ModelError, UnsupportedModelError
from foretell.hub import open_checkpoint
from foretell.models.config import ModelConfig
from foretell.models.draft_heads import (
    BlockHead,
    DraftHead,
    EagleConfig,
    EagleHead,
    HeadConfig,
    TargetWeights,
    make_head,
)
from foretell.models.draft_heads.config import BlockConfig, MedusaConfig, MtpConfig
from foretell.models.draft_heads.dense_attention import DenseBlockAttention, DenseChainAttention
from foretell.models.draft_heads.formats import kind_of, load_foreign
from foretell.models.draft_heads.layer import init_weights
from tests.tiny import HEADS

DATA = Path(__file__).parent / "data"
TARGET = ModelConfig(vocab=40, width=16, layers=8, heads=4, kv_heads=2, head_dim=4, ffn=24, context=64)


def load(folder: Path, target: ModelConfig = TARGET) -> DraftHead[Any]:
    checkpoint = open_checkpoint(folder)
    return load_foreign(str(folder), checkpoint.config, dict(checkpoint.tensors()), target)


def outside(name: str) -> tuple[DraftHead[Any], dict[str, Tensor]]:
    """Return a head as it is loaded here, and the output of speculators."""
    seen = load_file(DATA / name / "expected.st")
    head = load(DATA / name)
    head.share_weights(TargetWeights(seen["embed"], seen.get("output", torch.zeros(40, 16)), torch.ones(16), 1e-5))
    head.prepare(64)
    return head, seen


@pytest.mark.parametrize("name", ["eagle3_llama", "eagle3_whole", "eagle31_qwen"])
@torch.no_grad()
def test_eagle_heads_match_speculators(name: str) -> None:
    head, seen = outside(name)
    assert isinstance(head, EagleHead) and head.config.hidden_layers == (2, 4, 5)
    tokens, feature, attend = seen["tokens"], head.fuse(seen["features"]), DenseChainAttention(head.config.layer)
    for step, expected in enumerate(seen["logits"]):
        fed = torch.cat([tokens[step:], tokens.new_zeros(step)])
        states = head.step(fed, feature, head.rope_rows(torch.arange(len(tokens)) + 1 + step), attend)
        assert (head.logits(states) - expected).abs().max() < 1e-4
        feature = head.carry(states)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
@torch.no_grad()
def test_block_heads_match_speculators(name: str) -> None:
    head, seen = outside(name)
    assert isinstance(head, BlockHead) and head.config.hidden_layers == (1, 3)
    anchors, positions = seen["anchors"], torch.arange(len(seen["tokens"]))
    read = head.context_kv(head.fuse(seen["features"]), head.rope_rows(positions))
    rows = anchors[:, None] + torch.arange(head.config.block)
    states = head(seen["tokens"][anchors], head.rope_rows(rows), DenseBlockAttention(head.config, read, anchors))
    before = seen["tokens"][rows]
    assert (head.logits(states, before) - seen["logits"]).abs().max() < 1e-4
    assert head.config.sample_from_anchor == (name == "dspark") == head.config.confidence
    if name == "dspark":
        assert (head.confidence_logits(states, before) - seen["sure"]).abs().max() < 1e-4


def test_draft_token_ids_are_read_as_offsets() -> None:
    head, _ = outside("eagle3_llama")
    raw = load_file(DATA / "eagle3_llama" / "model.safetensors")
    assert head.draft_ids.tolist() == raw["t2d"].nonzero()[:, 0].tolist()


# Other formats: a head of ours written under their names, and read again.

LAYER = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "rms_norm_eps": 1e-5, "vocab_size": 40, "num_hidden_layers": 1, "max_position_embeddings": 2048,
}  # fmt: skip


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def layer_tensors(prefix: str, inputs: int = 16, norms: tuple[str, ...] = ("input_layernorm",)) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (16, inputs), "self_attn.k_proj": (8, inputs), "self_attn.v_proj": (8, inputs),
        "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        "post_attention_layernorm": (16,), **dict.fromkeys(norms, (16,)),
    }  # fmt: skip
    return {f"{prefix}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def eagle3_tensors(prefix: str = "midlayer") -> dict[str, Tensor]:
    ids = torch.arange(0, 40, 2)
    return {
        **layer_tensors(prefix, 32, ("input_layernorm", "hidden_norm")),
        "fc.weight": torch.randn(16, 48), "norm.weight": torch.randn(16), "lm_head.weight": torch.randn(20, 16),
        "d2t": ids - torch.arange(20), "t2d": torch.arange(40) % 2 == 0,
    }  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor], str, dict[str, Any]]] = {
    "EAGLE-3": (
        {**LAYER, "draft_vocab_size": 20}, eagle3_tensors(),
        "eagle", {"hidden_layers": (2, 4, 5), "draft_vocab": 20},
    ),
    "SpecForge": (
        {**LAYER, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, eagle3_tensors("layers.0"),
        "eagle", {"hidden_layers": (2, 4, 7), "norm_before_residual": False},
    ),
    "NVIDIA": (
        {**LAYER, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 8], "norm_before_fc": True}},
        {**eagle3_tensors(), "input_norm.weight": torch.randn(48)}, "eagle",
        {"hidden_layers": (2, 3, 8), "norm_before_fc": True},
    ),
    "3.1 by older names": (
        {**LAYER, "norm_output": True},
        {**eagle3_tensors(), **{f"aux_norm_{name}.weight": torch.randn(16) for name in ("low", "mid", "high")}},
        "eagle", {"fc_norm": True, "norm_output": True},
    ),
    "EAGLE": (
        LAYER, {**layer_tensors("model.layers.0", norms=()), "model.fc.weight": torch.randn(16, 32),
                "model.fc.bias": torch.randn(16)},
        "eagle", {"generation": 1, "hidden_layers": (8,), "target_norm": True, "fc_bias": True, "own_output": False},
    ),
    "DFlash": (
        {**LAYER, "num_hidden_layers": 2, "architectures": ["DFlashDraftModel"], "block_size": 6,
         "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4]}},
        {**layer_tensors("layers.0"), **layer_tensors("layers.1"), "fc.weight": torch.randn(16, 32),
         "hidden_norm.weight": torch.randn(16), "norm.weight": torch.randn(16)},
        "block", {"hidden_layers": (1, 5), "block": 6, "layers": 2, "mask_token": 3, "sample_from_anchor": False},
    ),
    "DSpark": (
        {**LAYER, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4], "block_size": 7}},
        {**layer_tensors("layers.0"), "fc.weight": torch.randn(16, 32), "hidden_norm.weight": torch.randn(16),
         "norm.weight": torch.randn(16), "markov_head.markov_w1.weight": torch.randn(40, 4),
         "markov_head.markov_w2.weight": torch.randn(40, 4), "confidence_head.proj.weight": torch.randn(1, 20),
         "confidence_head.proj.bias": torch.randn(1)},
        "block",
        {"hidden_layers": (1, 5), "block": 7, "markov_rank": 4, "confidence": True, "sample_from_anchor": True},
    ),
    "Medusa": (
        {"medusa_num_heads": 2, "medusa_num_layers": 1},
        {f"medusa_head.{i}.{name}": torch.randn(shape) for i in range(3)
         for name, shape in {"0.linear.weight": (16, 16), "0.linear.bias": (16,), "1.weight": (40, 16)}.items()},
        "medusa", {"heads": 3, "layers": 1, "own_output": True, "hidden_layers": (8,)},
    ),
    "Medusa in vLLM": (
        {"num_heads": 2, "hidden_size": 16},
        {"blocks.0.layers.0.weight": torch.randn(16, 16), "blocks.1.layers.0.weight": torch.randn(16, 16),
         "lm_head.weight": torch.randn(10, 16), "token_map": torch.arange(10) * 3},
        "medusa", {"heads": 2, "bias": False, "shared_output": True, "draft_vocab": 10},
    ),
    "MTP of Qwen": (
        LAYER, {"model.embed_tokens.weight": torch.randn(40, 16), **layer_tensors("mtp.layers.0"),
                "mtp.fc.weight": torch.randn(16, 32), "mtp.norm.weight": torch.randn(16),
                "mtp.pre_fc_norm_embedding.weight": torch.randn(16), "mtp.pre_fc_norm_hidden.weight": torch.randn(16)},
        "mtp", {"norm_output": True, "hidden_layers": (8,), "own_embed": False},
    ),
    "MTP of DeepSeek": (
        LAYER, {"model.embed_tokens.weight": torch.randn(40, 16), **layer_tensors("model.layers.8"),
                "model.layers.8.eh_proj.weight": torch.randn(16, 32), "model.layers.8.enorm.weight": torch.randn(16),
                "model.layers.8.hnorm.weight": torch.randn(16),
                "model.layers.8.embed_tokens.weight": torch.randn(40, 16),
                "model.layers.8.shared_head.norm.weight": torch.randn(16)},
        "mtp", {"norm_output": False, "hidden_layers": (8,)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_format_is_recognized_by_its_names(name: str, tmp_path: Path) -> None:
    config, tensors, kind, expected = CASES[name]
    folder = written(tmp_path / "head", config, tensors)
    checkpoint = open_checkpoint(folder)
    assert kind_of(checkpoint.config, frozenset(checkpoint.lazy_tensors)) == kind
    head = load(folder)
    assert head.config.kind == kind
    assert {field: getattr(head.config, field) for field in expected} == expected


def test_weights_are_loaded_into_the_right_parameters(tmp_path: Path) -> None:
    """Keys above values, gate above up."""
    tensors = eagle3_tensors()
    head = load(written(tmp_path / "head", LAYER, tensors))
    state, attn = head.state_dict(), "midlayer.self_attn"
    stacked = torch.cat([tensors[f"{attn}.k_proj.weight"], tensors[f"{attn}.v_proj.weight"]])
    assert state["layers.0.attention.kv.weight"].equal(stacked)
    assert state["embed_norm.weight"].equal(tensors["midlayer.input_layernorm.weight"])
    assert state["feature_norm.weight"].equal(tensors["midlayer.hidden_norm.weight"])


def test_mismatched_weights_raise_an_error(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    with pytest.raises(ModelError, match="does not belong"):
        load(written(tmp_path / "spare", LAYER, {**tensors, "midlayer.mystery.weight": torch.ones(1)}))
    with pytest.raises(ModelError, match="is it a head for this target"):
        load(written(tmp_path / "width", LAYER, {**tensors, "fc.weight": torch.randn(16, 60)}))
    with pytest.raises(ModelError, match="ascending"):
        load(written(tmp_path / "ids", LAYER, {**tensors, "d2t": torch.arange(20).flip(0)}))
    with pytest.raises(ModelError, match=r"norm.weight.* is missing"):
        load(written(tmp_path / "less", LAYER, {k: v for k, v in tensors.items() if k != "norm.weight"}))
    with pytest.raises(UnsupportedModelError, match="P-EAGLE"):
        load(written(tmp_path / "peagle", {**LAYER, "speculators_model_type": "peagle"}, tensors))


def test_a_head_of_our_format_round_trips(tmp_path: Path) -> None:
    from foretell.models.draft_heads import LayerConfig, read_head, write_head
    from foretell.models.draft_heads.config import read_head_config

    layer = LayerConfig(width=16, heads=4, kv_heads=2, head_dim=4, ffn=24)
    common = (layer, 40, 16, (2, 5))
    configs: list[HeadConfig] = [
        EagleConfig(*common, draft_vocab=20, fc_norm=True, accuracy=(0.7, 0.5), target="somebody"),
        MtpConfig(layer, 40, 16, (8,), target_norm=True),
        BlockConfig(*common, markov_rank=3, confidence=True, own_output=True),
        MedusaConfig(layer, 40, 16, (8,), own_output=True, heads=2),
    ]
    for i, config in enumerate(configs):
        head = make_head(config)
        init_weights(head, torch.Generator().manual_seed(i))
        write_head(head, tmp_path / str(i))
        again = read_head(tmp_path / str(i))
        assert again.config == config == read_head_config(json.loads((tmp_path / str(i) / "config.json").read_text()))
        assert all(again.own_state_dict()[name].equal(tensor) for name, tensor in head.own_state_dict().items())


@pytest.mark.parametrize(
    "change", [{"look_back": 5}, {"look_back": -4}, {"look_back": 4, "target_norm": True}], ids=str
)
def test_an_invalid_look_back_raises_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="look"):
        replace(HEADS["block that looks back"], **change)
