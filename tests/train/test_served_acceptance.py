"""The acceptance that training estimates is the acceptance in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.registry import head_drafter
from foretell.engine.engine import Engine
from foretell.engine.scheduler import Scheduler
from foretell.engine.sequence_state import SequenceState
from foretell.models.draft_heads import DraftHead, TargetWeights, read_head
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.model_runner import ModelRunner
from foretell.train.token_dataset import BatchLoader, Document
from foretell.train.trainer import estimate_acceptance
from tests.tiny import add, run

from .test_objectives import KINDS, trained
from .toy_target import CONTEXT, CPU, documents, target

DRAFT_TOKENS = {"eagle": 4, "block": 7, "medusa": 3, "distill": 4}
TOKENS = 22


def generate(head: DraftHead[Any] | None, draft_tokens: int) -> tuple[list[SequenceState], float]:
    """Generate with the toy target and a head, or n-grams; return the sequences and tokens per step."""
    model = target()
    lender = TargetWeights.of(model)
    hidden_layers, head_layers = (
        ((), ()) if head is None else (head.config.hidden_layers, head_layer_shapes(head.config))
    )
    runner = ModelRunner(model, 128, 4, 2 * CONTEXT, hidden_layers, head_layers)
    drafter: Drafter = NGramDrafter()
    if head is not None:
        head.share_weights(lender)
        head.prepare(2 * CONTEXT)
        drafter = head_drafter(runner, head, model.config.layers, "head")
    engine = Engine(runner, drafter, FixedController(draft_tokens), Scheduler(runner, None, 8, 64))
    prompts = [each.prompt for each in documents(seed=2, count=4)]
    states = [t for i, prompt in enumerate(prompts) for t in add(engine, str(i), prompt, max_tokens=TOKENS)]
    run(engine)
    steps, tokens = sum(t.speculation.steps for t in states), sum(t.speculation.tokens for t in states)
    return states, tokens / steps


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_accepts_what_training_estimated(kind: str, tmp_path: Path) -> None:
    """R26: training and serving agree on accepted tokens per step, on the same documents."""
    trainer = trained(kind, 40, tmp_path)
    trainer.objective.save(tmp_path / "head", ())
    states, accepted = generate(read_head(tmp_path / "head"), DRAFT_TOKENS[kind])
    generated = [Document(np.array(t.seq.tokens, np.int64), len(t.seq.request.prompt)) for t in states]
    estimated, _ = estimate_acceptance(trainer.objective, trainer.capture, BatchLoader(generated, 512, 0, CPU), 0)
    assert estimated == pytest.approx(accepted, rel=0.01)
    assert accepted > 1.1


def test_a_trained_head_beats_n_grams_without_repetition(tmp_path: Path) -> None:
    trainer = trained("eagle", 100, tmp_path)
    trainer.objective.save(tmp_path / "head", ())
    _, accepted = generate(read_head(tmp_path / "head"), 4)
    _, by_ngrams = generate(None, 4)
    assert accepted > by_ngrams + 0.6
