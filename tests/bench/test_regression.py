"""No drafter gets worse unseen: accepted per step on a few fixed prompts, against what is stored.

`python -m tests.bench.test_regression` measures and prints what would be stored; a drafter that got better is stored
in `accepted.json`, one that got worse needs a reason in the log.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.bench.engine_backend import NO_SPECULATION, EngineBackend
from foretell.bench.measure import NEED_FILES, PLAIN, Sample, measure, variants_of
from foretell.bench.prompt import BenchPrompt
from foretell.bench.results import summarize
from foretell.bench.settings import BenchSettings
from foretell.bench.workloads import load, select
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft.registry import HEADS, KINDS
from foretell.models.draft_heads.loading import SHIPPED
from tests.bench.fakes import ignore_progress

STORED = Path(__file__).parent / "accepted.json"
SHARE = 0.95  # of the stored figure
DEAD = 1.02  # a drafter of which nothing stands writes a token a step
TASKS = ("edit", "code", "chat")
LENGTH, TOKENS = 4, 32  # draft length, fixed so that no time decides it; output tokens
# Drafters that need an argument; int4 takes long to quantize. The built-in model drafts for itself.
NEEDS = {"self": "self:int8", "exit": "exit:25", "model": f"model:{EngineConfig.model}"}


def drafters() -> list[str]:
    """Every kind there is, so that a new one cannot be forgotten; of heads those that come with the package.

    What a drafter of files drafts depends on the files: `tests/draft/test_draft_corpus.py` has its own.
    """
    heads = {*HEADS, "distilled"}
    here = [
        kind for kind in KINDS if kind not in (*NEED_FILES, *heads) or (SHIPPED / EngineConfig.model / kind).exists()
    ]
    return [NEEDS.get(kind, kind) for kind in here]


def accepted_per_step(names: list[str]) -> dict[str, float]:
    """Over one prompt of each task, greedy, in the model's own integers: the same on every machine with our kernels."""
    from foretell.bench.drafter_slots import DrafterSlots, load_llm_for
    from foretell.build.model_source import no_progress, open_model

    variants = variants_of(names, [LENGTH], SpeculationConfig())
    llm = load_llm_for(variants, quiet=True)
    backend = EngineBackend(llm, DrafterSlots(llm, open_model(llm.config.model, EngineConfig(), no_progress)))
    settings = BenchSettings(max_tokens=TOKENS, rounds=1, temperatures=(0.0,), schemas=False)
    items, _ = select(load("own", tasks=TASKS), 1, lambda item: backend.fits(item, settings))
    samples: list[Sample] = []
    measure(
        backend,
        [PLAIN, *variants],
        [expecting(item, backend, settings) for item in items],
        settings,
        samples,
        ignore_progress,
    )
    _, overall = summarize(samples, names)
    assert all(cell.same_text is True and cell.drafter_failures == 0 for cell in overall)
    return {cell.variant: round(cell.tokens / cell.steps, 3) for cell in overall}


def expecting(item: BenchPrompt, backend: EngineBackend, settings: BenchSettings) -> BenchPrompt:
    """The item with a prediction that comes true but for a word in its midst."""
    (job,) = backend.prepare(item, 0.0, settings)
    (output,) = backend.llm.generate([list(job.prompt)], job.params, speculation=NO_SPECULATION)
    words = output.outputs[0].text.split(" ")
    words[len(words) // 2] = "otherwise"
    return replace(item, prediction=" ".join(words))


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return accepted_per_step(drafters())


@pytest.mark.weights
@pytest.mark.parametrize("name", drafters())
def test_a_drafter_is_as_good_as_it_was(found: dict[str, float], name: str) -> None:
    stored = json.loads(STORED.read_text())
    assert name in stored, f"{name} is new: store its figure, {found[name]}"
    assert found[name] >= SHARE * stored[name], f"{name} fell from {stored[name]} to {found[name]} accepted per step"


@pytest.mark.weights
@pytest.mark.parametrize("name", drafters())
def test_no_drafter_is_dead(found: dict[str, float], name: str) -> None:
    assert found[name] > DEAD, f"no draft token of {name} is accepted"


def test_what_is_stored_belongs_to_drafters_that_live() -> None:
    stored = json.loads(STORED.read_text())
    assert set(stored) == set(drafters()) and all(figure > DEAD for figure in stored.values())


if __name__ == "__main__":
    print(json.dumps(accepted_per_step(drafters()), indent=2))
