"""RoPE scaling by an option: the same as in the model's config, and with speculation as without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretell import LLM, SamplingParams
from foretell.errors import RequestError
from foretell.hub.checkpoint import open_checkpoint
from foretell.models.config import Rope
from foretell.models.hf_config import read_config
from foretell.models.rope import rope_table
from foretell.models.rope_scaling import read_scaling, scaled_config
from tests.folder import write_tiny_folder

TRAINED = 128
PROMPT = "The quick brown fox jumps over the lazy dog. " * 16


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_it_is_the_scaling_of_a_config(tmp_path: Path, kind: str) -> None:
    plain = read_config(open_checkpoint(write_tiny_folder(tmp_path / "plain")))
    stated = write_tiny_folder(tmp_path / "stated")
    file = stated / "config.json"
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": plain.context}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": scaling}))
    expected = read_config(open_checkpoint(stated)).ropes[0]
    scaled = scaled_config(plain, f"{kind}:4")
    assert scaled.context == 4 * plain.context
    assert {(rope.kind, rope.theta, rope.factor) for rope in scaled.ropes} == {(kind, expected.theta, 4.0)}
    tables = [rope_table(rope, plain.head_dim, scaled.context) for rope in (expected, scaled.ropes[0], plain.ropes[0])]
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])
    assert read_scaling(json.dumps({"rope_type": kind, "factor": 4})) == (kind, 4.0)


def test_layers_with_a_window_keep_their_rope(tmp_path: Path) -> None:
    plain = read_config(open_checkpoint(write_tiny_folder(tmp_path / "m")))
    mixed = replace(plain, windows=(16, *plain.windows[1:]))
    scaled = scaled_config(mixed, "yarn:2")
    assert scaled.ropes[0] == plain.ropes[0] and scaled.ropes[1].kind == "yarn"
    with pytest.raises(RequestError, match="scaled already"):
        scaled_config(replace(plain, ropes=(Rope(kind="llama3"),) * plain.layers), "yarn:2")


@pytest.mark.parametrize(
    "wanted", ["yarn", "yarn:", "yarn:1", "yarn:x", "yarn:nan", "yarn:1e9", "dynamic:2", "ntk:2", "{}"]
)
def test_other_scalings_are_refused_in_words(wanted: str) -> None:
    with pytest.raises(RequestError, match="yarn:4"):
        read_scaling(wanted)


def test_outputs_beyond_the_trained_context_are_the_same_with_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_tiny_folder(tmp_path / "m"))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with pytest.raises(RequestError, match="--rope-scaling"):
        LLM(folder, drafter="none", max_model_len=4 * TRAINED, quiet=True)
    outputs = []
    for drafter in ("none", "suffix,recycle"):
        llm = LLM(folder, drafter=drafter, rope_scaling="yarn:4", max_model_len=3 * TRAINED)
        assert "may be worse" in capsys.readouterr().err
        (output,) = llm.generate(PROMPT, params)
        outputs.append(output.outputs[0].token_ids)
        assert len(output.prompt_token_ids) > TRAINED
    assert outputs[0] == outputs[1] and len(outputs[0]) == 60
