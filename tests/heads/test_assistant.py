"""Gemma 4's assistant: the logits of transformers, and drafts that change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.hub import open_checkpoint
from foretell.models.draft_heads import AssistantHead
from foretell.models.draft_heads.loading import open_head
from foretell.models.load import load_model
from foretell.models.tied_weights import share_target_weights
from foretell.runner.heads.assistant import AssistantSteps
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import NO_DRAFT, Request, ScheduledSequence, Sequence
from tests.heads import assistants
from tests.models import families

TARGETS = ("gemma4", "gemma4, values are keys")
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
    with assistants.repaired:
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
