"""What training says of a head is what the engine makes of it."""

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
from foretell.runner.heads.kv import beside
from foretell.runner.model_runner import ModelRunner
from foretell.train.batches import Batches
from foretell.train.token_dataset import Document
from foretell.train.trainer import estimate
from tests.tiny import add, run

from .test_methods import KINDS, trained
from .toys import CONTEXT, CPU, target, texts

GUESSES = {"eagle": 4, "block": 7, "medusa": 3, "distill": 4}
TOKENS = 22


def write(head: DraftHead[Any] | None, guesses: int) -> tuple[list[SequenceState], float]:
    """Texts of the toy target, with a head's guesses or with n-grams; and tokens a step."""
    model = target()
    lender = TargetWeights.of(model)
    taps, layers = ((), ()) if head is None else (head.config.hidden_layers, beside(head.config))
    runner = ModelRunner(model, 128, 4, 2 * CONTEXT, taps, layers)
    drafter: Drafter = NGramDrafter()
    if head is not None:
        head.share_weights(lender)
        head.prepare(2 * CONTEXT)
        drafter = head_drafter(runner, head, model.config.layers, "head")
    engine = Engine(runner, drafter, FixedController(guesses), Scheduler(runner, None, 8, 64))
    prompts = [each.prompt for each in texts(seed=2, count=4)]
    tracks = [t for i, prompt in enumerate(prompts) for t in add(engine, str(i), prompt, max_tokens=TOKENS)]
    run(engine)
    steps, tokens = sum(t.speculation.steps for t in tracks), sum(t.speculation.tokens for t in tracks)
    return tracks, tokens / steps


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_accepts_what_training_foretold(kind: str, tmp_path: Path) -> None:
    """R26: the figure that training shows is the one that serving gives, on the same texts."""
    trainer = trained(kind, 40, tmp_path)
    trainer.method.write(tmp_path / "head", ())
    tracks, accepted = write(read_head(tmp_path / "head"), GUESSES[kind])
    written = [Document(np.array(t.seq.tokens, np.int64), len(t.seq.request.prompt)) for t in tracks]
    foretold, _ = estimate(trainer.method, trainer.capture, Batches(written, 512, 0, CPU), 0)
    assert foretold == pytest.approx(accepted, rel=0.01)
    assert accepted > 1.1


def test_a_trained_head_beats_n_grams_where_nothing_was_said_before(tmp_path: Path) -> None:
    trainer = trained("eagle", 100, tmp_path)
    trainer.method.write(tmp_path / "head", ())
    _, accepted = write(read_head(tmp_path / "head"), 4)
    _, by_ngrams = write(None, 4)
    assert accepted > by_ngrams + 0.6
