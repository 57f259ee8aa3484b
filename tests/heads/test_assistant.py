"""Gemma 4's assistant: the logits of transformers, and drafts that change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell import LLM
from foretell.errors import ModelError, RequestError
from foretell.hub import open_checkpoint
from foretell.models.draft_heads import AssistantHead
from foretell.models.draft_heads.loading import open_head
from foretell.models.load import load_model
from foretell.models.tied_weights import share_target_weights
from foretell.runner.heads.assistant import AssistantSteps
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import NO_DRAFT, Request, ScheduledSequence, Sequence
from tests.folder import write_tiny_folder
from tests.heads import assistants
from tests.models import families

TARGETS = ("gemma4", "gemma4, values are keys", "gemma4 unified")
STEPS = 4


@torch.inference_mode()
def their_logits(target: Any, assistant: Any, tokens: list[int], drafted: list[int]) -> torch.Tensor:
    """Return transformers' logits of each draft step, over the KV of all tokens but the last."""
    seen = target(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    hidden, logits = seen.hidden_states[-1][:, -1:], []
    for token in (tokens[-1], *drafted):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        output = assistant(
            inputs_embeds=torch.cat([embedded, hidden], -1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=dict(seen.shared_kv_states),
        )
        hidden = output.last_hidden_state
        logits.append(output.logits[0, 0])
    return torch.stack(logits)


def loaded(folder: Path, assistant: Path) -> tuple[ModelRunner, AssistantHead]:
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint)
    head = open_head(assistant, model.config).load(share_target_weights(checkpoint, model), model.dtype, 128)
    assert isinstance(head, AssistantHead)
    return ModelRunner(model, 64, 4, 128, head.config.hidden_layers), head


@torch.inference_mode()
def our_logits(runner: ModelRunner, head: AssistantHead, tokens: list[int], drafted: list[int]) -> torch.Tensor:
    seq = Sequence(0, Request("0", (), SamplingParams(), 0, 8), list(tokens))
    assert runner.reserve(seq, len(tokens))
    output = runner.forward([ScheduledSequence.of(seq, len(tokens) - 1)], [NO_DRAFT])
    assert output.hidden_states is not None
    steps = AssistantSteps(head, runner.cache, [seq], output.hidden_states[-1:])
    return torch.cat([steps.chain_step([token]) for token in (tokens[-1], *drafted)])


@pytest.mark.parametrize("ordered", [False, True], ids=["all tokens", "clusters"])
@pytest.mark.parametrize("target", TARGETS)
def test_an_assistant_has_the_logits_of_transformers(target: str, ordered: bool, tmp_path: Path) -> None:
    with assistants.repaired():
        theirs = families.save(target, tmp_path / "target")
    assistant = assistants.save(tmp_path / "assistant", target, ordered)
    runner, head = loaded(tmp_path / "target", tmp_path / "assistant")
    for length in (2, 9, 10, 11, 40):  # around the window, too
        tokens, drafted = families.text(length), families.text(STEPS)
        expected = their_logits(theirs, assistant, tokens, drafted)
        found = our_logits(runner, head, tokens, drafted)
        known = found.isfinite()
        assert known.any(-1).all() and (ordered or known.all())
        assert (found - expected)[known].abs().max() <= 1e-3 * expected.abs().max()
        assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


PROMPTS = ["The quick brown fox jumps over the lazy dog.", "She sells", "The"] * 2
SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3}}
SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"quantization": "int8"},
    "no prefix cache": {"prefix_cache": False, "max_num_seqs": 3, "max_num_batched_tokens": 16},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "trees": {"tree_nodes": 8},
}


@pytest.fixture(scope="module", params=[False, True], ids=["all tokens", "clusters"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return assistants.write_pair(tmp_path_factory.mktemp("pair"), request.param)


def texts(target: Path, drafter: str, sampling: str, **settings: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(target, drafter=drafter, quiet=True, **settings)
    params = SamplingParams(max_tokens=20, ignore_eos=True, **SAMPLINGS[sampling])  # type: ignore[arg-type]
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params)], llm


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("settings", SERVED.values(), ids=SERVED)
def test_an_assistant_serves_and_changes_no_output(
    pair: tuple[Path, Path], sampling: str, settings: dict[str, Any]
) -> None:
    target, assistant = pair
    name = f"assistant:{assistant}"
    plain, _ = texts(target, "none", sampling, **{k: v for k, v in settings.items() if k != "tree_nodes"})
    drafted, llm = texts(target, name, sampling, **{"num_speculative_tokens": 4, **settings})
    assert drafted == plain
    assert llm.engine.stats.speculation.by_drafter[name].drafted > 0 and llm.engine.stats.drafter_failures == 0
    assert llm.engine.drafter.drafters[name].traits.weight_bytes > 0


def test_a_folder_is_known_as_an_assistant(pair: tuple[Path, Path]) -> None:
    """By the name of a draft model, of vLLM's method, and alone."""
    target, assistant = pair
    plain, _ = texts(target, "none", "greedy")
    for name in (f"model:{assistant}", f"mtp:{assistant}", str(assistant)):
        drafted, llm = texts(target, name, "greedy")
        assert drafted == plain and len(llm.engine.drafter.drafters) >= 1


def changed(folder: Path, into: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """Return a copy of an assistant with other settings or tensors."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    into.mkdir()
    (into / "config.json").write_text(json.dumps(config))
    save_file({name: values.contiguous() for name, values in tensors.items()}, into / "model.safetensors")
    return into


Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
DAMAGED: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], str]] = {
    "of another width": (lambda config, _: config.update(backbone_hidden_size=48), "backbone_hidden_size is 48"),
    "of another vocabulary": (lambda config, _: config["text_config"].update(vocab_size=64), "vocab_size is 64"),
    "of other heads": (lambda config, _: config["text_config"].update(head_dim=12), "heads of 12"),
    "impossible heads": (lambda config, _: config["text_config"].update(num_attention_heads=3), "3 heads"),
    "other layers": (
        lambda config, _: config["text_config"].update(layer_types=["mamba"] * 3),
        "text_config: 'gemma4_text' is a model of the recurrent",
    ),
    "no text config": (lambda config, _: config.pop("text_config"), "vocab_size is 262144"),
    "a mixture": (lambda config, _: config["text_config"].update(enable_moe_block=True), "mixture-of-experts"),
    "too many clusters": (
        lambda config, _: config.update(use_ordered_embeddings=True, num_centroids=2**30),
        "num_centroids",
    ),
    "clusters that do not divide": (
        lambda config, _: config.update(use_ordered_embeddings=True, num_centroids=7, centroid_intermediate_top_k=2),
        "num_centroids is 7",
    ),
    "a missing tensor": (lambda _, tensors: tensors.pop(Q), Q.removeprefix("model.")),
    "a wrong shape": (lambda _, tensors: tensors.update({GATE: torch.zeros(40, 23)}), GATE.removeprefix("model.")),
    "a stray tensor": (lambda _, tensors: tensors.update({"model.stray": torch.zeros(2)}), "'stray'"),
    "not finite": (lambda _, tensors: tensors[Q].fill_(float("nan")), Q.removeprefix("model.")),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_mismatching_assistant_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    target, assistant = assistants.write_pair(tmp_path)
    change, words = DAMAGED[name]
    folder = changed(assistant, tmp_path / "changed", change)
    with pytest.raises(ModelError) as caught:
        LLM(target, drafter=f"assistant:{folder}", quiet=True)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_assistant_is_refused_for_other_families(tmp_path: Path) -> None:
    assistants.save(tmp_path / "assistant", "gemma4")
    with pytest.raises(ModelError, match="drafts for Gemma 4, and the target is llama"):
        LLM(write_tiny_folder(tmp_path / "llama"), drafter=f"assistant:{tmp_path / 'assistant'}", quiet=True)


def test_an_assistant_is_named_by_its_folder(tmp_path: Path) -> None:
    target = write_tiny_folder(tmp_path / "target")
    with pytest.raises(RequestError, match="assistant is written assistant:FOLDER"):
        LLM(target, drafter="assistant", quiet=True)
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"file\.gguf: draft heads are read from a folder"):
        LLM(target, drafter=f"assistant:{tmp_path / 'file.gguf'}", quiet=True)


def test_token_ordering_has_every_token_once(tmp_path: Path) -> None:
    target, assistant = assistants.write_pair(tmp_path, ordered=True)
    order = "masked_embedding.token_ordering"
    folder = changed(assistant, tmp_path / "changed", lambda _, tensors: tensors[order].fill_(10**6))
    with pytest.raises(ModelError, match=order):
        LLM(target, drafter=f"assistant:{folder}", quiet=True)
