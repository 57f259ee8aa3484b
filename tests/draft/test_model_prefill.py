"""A draft model runs no more rows in one forward than memory was planned for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from foretell import LLM, SamplingParams
from foretell.draft.model import ModelDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.runner.model_runner import ModelRunner
from foretell.types import Draft, ScheduledSequence
from tests.draft.tiny_tokenizers import string_translator, token_translator
from tests.tiny import CONTEXT, VOCAB, World, add, generate, model_drafter, run, tiny_decoder

PROMPTS = [[1 + (i + j) % 9 for j in range(50)] for i in range(8)]


def chained() -> GraphModelDrafter:
    return GraphModelDrafter(ModelRunner(tiny_decoder(), 512, 4, CONTEXT), VOCAB, "model")


def count_rows(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows: list[int] = []
    forward = runner.forward

    def counted(shares: list[ScheduledSequence], drafts: list[Draft]) -> object:
        rows.append(sum(share.num_new_tokens for share in shares) + sum(map(len, drafts)))
        return forward(shares, drafts)

    monkeypatch.setattr(runner, "forward", counted)
    return rows


MAKERS: dict[str, Callable[[], ModelDrafter]] = {
    "model": lambda: model_drafter(pages=512),
    "chained": chained,
    "translated tokens": lambda: token_translator(pages=512),
    "translated strings": lambda: string_translator(pages=512),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_many_new_sequences_are_prefilled_in_groups(
    make: Callable[[], ModelDrafter], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them reach the draft model in the same step."""
    truth = generate(prompts=PROMPTS, temperature=temperature, world=World(pages=512, max_step_tokens=512))
    drafter = make()
    drafter.max_rows = 32
    rows = count_rows(drafter.runner, monkeypatch)
    engine = World(pages=512, max_step_tokens=512).engine(drafter)
    tracks = [add(engine, str(i), prompt, temperature=temperature)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth
    assert engine.stats.speculation.drafted > 0
    assert max(rows) <= 32
    assert rows[0] == 32, "a forward is as large as it may be"


def test_the_bound_is_what_memory_is_planned_for(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"num_speculative_tokens": 3, "max_num_seqs": 8, "max_num_batched_tokens": 16, "quiet": True}
    llm = LLM(tiny_folder, drafter=f"model:{tiny_folder}", **options)  # type: ignore[arg-type]
    drafter = llm.engine.drafter.drafters[f"model:{tiny_folder}"]
    assert isinstance(drafter, ModelDrafter) and drafter.max_rows == 16
    rows = count_rows(drafter.runner, monkeypatch)
    outputs = llm.generate([PROMPTS[0]] * 8, SamplingParams(max_tokens=6, ignore_eos=True))
    assert sum(output.speculation.drafted for output in outputs) > 0 and 0 < max(rows) <= 16
