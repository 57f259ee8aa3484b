"""Four processes generate what one generates, with and without drafts, preemption and aborts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.engine import Engine
from tests.tensor_parallel.world import Split, SplitHead, split
from tests.tiny import HEADS, PROMPTS, World, add, generate, model_drafter, random_tree, run, tree_around

Texts = list[list[int]]
SERVED = {name: HEADS[name] for name in ("eagle", "eagle 1", "mtp", "block", "medusa")}
SAMPLING: dict[str, dict[str, object]] = {"greedy": {}, "sampled": {"temperature": 1.0}}
DRAFTERS: dict[str, Callable[[Texts], Drafter]] = {
    "ngram": lambda truth: NGramDrafter(1, 3),
    "model": lambda truth: model_drafter(seed=5),
    "random tree": lambda truth: ScriptedDrafter(random_tree),
    "tree around the text": tree_around,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with split(tmp_path_factory.mktemp("models") / "split", 4, heads=SERVED) as found:
        yield found


@pytest.fixture(scope="module")
def plain(ranks: Split) -> dict[str, Texts]:
    return {name: ranks.generate(**params) for name, params in SAMPLING.items()}  # type: ignore[arg-type]


def test_the_output_is_that_of_one_process(plain: dict[str, Texts]) -> None:
    for name, params in SAMPLING.items():
        assert plain[name] == generate(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_draft_does_not_change_the_output(ranks: Split, plain: dict[str, Texts], drafter: str, sampling: str) -> None:
    truth, params = plain[sampling], SAMPLING[sampling]
    assert ranks.generate(DRAFTERS[drafter](truth), **params) == truth  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SERVED)
def test_a_sharded_head_does_not_change_the_output(ranks: Split, plain: dict[str, Texts], name: str) -> None:
    found = ranks.generate(SplitHead(name), nodes=3, max_tokens=8, temperature=1.0)
    assert found == [text[:8] for text in plain["sampled"]]


@pytest.mark.parametrize("drafter", ["model", "tree around the text"])
def test_preemption_does_not_change_the_output(ranks: Split, plain: dict[str, Texts], drafter: str) -> None:
    turn = iter(range(10_000))

    def preempt_some(engine: Engine) -> None:
        if next(turn) % 4 == 1 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    truth = plain["sampled"]
    assert ranks.generate(DRAFTERS[drafter](truth), preempt_some, pages=24, temperature=1.0) == truth


def test_an_abort_does_not_change_other_outputs(ranks: Split, plain: dict[str, Texts]) -> None:
    engine = ranks.engine(DRAFTERS["tree around the text"](plain["greedy"]))
    tracks = [add(engine, str(i), prompt)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(3):
        engine.step()
    engine.abort("1")
    run(engine)
    for i, track in enumerate(tracks):
        written = track.seq.tokens[len(track.seq.request.prompt) :]
        assert written == plain["greedy"][i][: len(written)]
        assert (track.seq.finish_reason == "abort") == (i == 1)


def test_rows_are_as_exact_as_those_of_one_process(ranks: Split) -> None:
    assert ranks.engine().runner.is_batch_invariant == World().engine().runner.is_batch_invariant


def test_an_interrupt_of_a_terminal_reaches_the_leader_only(ranks: Split) -> None:
    assert os.getpgid(0) not in {os.getpgid(process) for process in ranks.team.pids}
