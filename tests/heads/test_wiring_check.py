"""The wiring check of heads from other sources: a wrong wiring is corrected, a foreign head is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell import LLM, SamplingParams
from foretell.draft.heads.wiring_check import accuracy, check_wiring
from foretell.errors import ForetellError, ModelError
from foretell.models.draft_heads import EagleConfig, EagleHead, MtpConfig, MtpHead
from tests.folder import write_tiny_folder
from tests.heads.toy_training import LAYER, Lesson

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
ON_RANKS = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
PROMPTS = ["The history of bread begins", "She sells sea shells"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def lesson(folder: Path) -> Lesson:
    return Lesson(folder)


@pytest.fixture(scope="module")
def taught(lesson: Lesson) -> EagleHead:
    config = EagleConfig(LAYER, lesson.config.vocab, 32, (1,), draft_vocab=250, fc_norm=True, norm_before_residual=True)
    head = lesson.teach(lesson.head(config))
    assert isinstance(head, EagleHead) and accuracy(head, lesson.samples) > 0.8
    return head


def test_a_right_wiring_is_kept(lesson: Lesson, taught: EagleHead) -> None:
    stated = taught.config
    assert check_wiring(lesson.runner, taught, lesson.starts, "it") == ""
    assert taught.config == stated


def test_hidden_layers_that_are_off_by_one_are_corrected(lesson: Lesson, taught: EagleHead) -> None:
    right = taught.config
    for wrong in ((0,), (2,)):
        taught.config = replace(right, hidden_layers=wrong)
        assert accuracy(taught, lesson.samples) < 0.5
        words = check_wiring(lesson.runner, taught, lesson.starts, "it")
        assert f"hidden layers (1,) instead of {wrong}" in words
        assert taught.config == right


def test_a_wrong_norm_is_corrected(lesson: Lesson, taught: EagleHead) -> None:
    right = taught.config
    taught.config = replace(right, norm_before_residual=False)
    words = check_wiring(lesson.runner, taught, lesson.starts, "it")
    assert taught.config == right and "norm_before_residual True" in words


def test_a_head_of_another_target_is_refused(lesson: Lesson) -> None:
    head = lesson.head(EagleConfig(LAYER, lesson.config.vocab, 32, (0, 1, 2)))
    with pytest.raises(ModelError, match="not a head for this target"):
        check_wiring(lesson.runner, head, lesson.starts, "it")


@ON_RANKS
def test_an_eagle3_checkpoint_serves(
    lesson: Lesson, taught: EagleHead, folder: Path, tmp_path: Path, ranks: int
) -> None:
    """With the authors' tensor names, and hidden layers as SpecForge counts them: 1 is the output of layer 1, h[2]."""
    state = taught.own_state_dict()
    kv, gate_up = state["layers.0.attention.kv.weight"].chunk(2), state["layers.0.ffn.gate_up.weight"].chunk(2)
    first = "midlayer"
    tensors = {
        "fc.weight": state["fc.weight"], "fc_norm.0.weight": state["tap_norms.0.weight"],
        "norm.weight": state["norm.weight"], "d2t": taught.draft_ids - torch.arange(250),
        f"{first}.input_layernorm.weight": state["embed_norm.weight"],
        f"{first}.hidden_norm.weight": state["feature_norm.weight"],
        f"{first}.post_attention_layernorm.weight": state["layers.0.ffn_norm.weight"],
        f"{first}.self_attn.q_proj.weight": state["layers.0.attention.q.weight"],
        f"{first}.self_attn.k_proj.weight": kv[0], f"{first}.self_attn.v_proj.weight": kv[1],
        f"{first}.self_attn.o_proj.weight": state["layers.0.attention.out.weight"],
        f"{first}.mlp.gate_proj.weight": gate_up[0], f"{first}.mlp.up_proj.weight": gate_up[1],
        f"{first}.mlp.down_proj.weight": state["layers.0.ffn.down.weight"],
        "lm_head.weight": taught.output.weight,
    }  # fmt: skip
    config = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "vocab_size": lesson.config.vocab, "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]},
    }  # fmt: skip
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, head / "model.safetensors")
    plain = LLM(folder, drafter="none", quiet=True).generate(PROMPTS, PARAMS)
    with LLM(folder, drafter=str(head), num_speculative_tokens=3, tensor_parallel_size=ranks, quiet=True) as llm:
        found = llm.generate(PROMPTS, PARAMS)
    assert [text.outputs[0].token_ids for text in found] == [text.outputs[0].token_ids for text in plain]
    assert llm.engine.runner.hidden_layers == (1,), "the config says 2, and the check finds 1"
    assert llm.engine.stats.speculation.accepted > 10
    assert next(iter(llm.engine.drafter.drafters)) == f"eagle:{head}"


@ON_RANKS
def test_the_targets_own_mtp_module_serves(lesson: Lesson, folder: Path, tmp_path: Path, ranks: int) -> None:
    head = lesson.teach(lesson.head(MtpConfig(LAYER, lesson.config.vocab, 32, (2,), target_norm=True)))
    assert isinstance(head, MtpHead)
    own = write_tiny_folder(tmp_path / "own")
    with pytest.raises(ForetellError, match="no multi-token prediction module found"):
        LLM(own, drafter="mtp", quiet=True)
    state = head.own_state_dict()
    kv, gate_up = state["layers.0.attention.kv.weight"].chunk(2), state["layers.0.ffn.gate_up.weight"].chunk(2)
    first = "model.layers.2"
    module = {
        "eh_proj": state["fc.weight"], "enorm": state["embed_norm.weight"], "hnorm": state["feature_norm.weight"],
        "shared_head.norm": state["norm.weight"], "input_layernorm": state["layers.0.attention_norm.weight"],
        "post_attention_layernorm": state["layers.0.ffn_norm.weight"],
        "self_attn.q_proj": state["layers.0.attention.q.weight"], "self_attn.k_proj": kv[0],
        "self_attn.v_proj": kv[1], "self_attn.o_proj": state["layers.0.attention.out.weight"],
        "mlp.gate_proj": gate_up[0], "mlp.up_proj": gate_up[1], "mlp.down_proj": state["layers.0.ffn.down.weight"],
    }  # fmt: skip
    tensors = load_file(own / "model.safetensors")
    tensors |= {f"{first}.{name}.weight": tensor.contiguous() for name, tensor in module.items()}
    save_file(tensors, own / "model.safetensors")
    plain = LLM(own, drafter="none", quiet=True).generate(PROMPTS, PARAMS)
    with LLM(own, drafter="mtp", num_speculative_tokens=3, tensor_parallel_size=ranks, quiet=True) as llm:
        found = llm.generate(PROMPTS, PARAMS)
    assert [text.outputs[0].token_ids for text in found] == [text.outputs[0].token_ids for text in plain]
    assert llm.engine.stats.speculation.accepted > 5
