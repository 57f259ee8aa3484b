"""Heads sharded with their target, in processes: lossless, accepted, and nothing hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.draft.heads.base import HeadDrafter
from foretell.engine.engine import Engine
from foretell.errors import RankError
from foretell.models.draft_heads import HeadConfig
from tests.tensor_parallel.test_lost_ranks import gone
from tests.tensor_parallel.world import Split, SplitHead, split
from tests.tiny import CONFIG, HEADS, PROMPTS, World, add, generate, run

Texts = list[list[int]]
MODEL = replace(CONFIG, heads=6, kv_heads=3)  # KV heads that do not divide by two
SERVED: dict[str, HeadConfig] = {
    name: replace(HEADS[name], layer=replace(HEADS[name].layer, heads=6, kv_heads=3))
    for name in ("eagle", "eagle of two layers", "mtp", "block", "block that looks back", "medusa", "distilled")
}
SHORT: dict[str, object] = {"max_tokens": 8}
SAMPLING: dict[str, dict[str, object]] = {"greedy": SHORT, "sampled": {**SHORT, "temperature": 1.0}}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("models") / "split"
    with split(folder, request.param, config=MODEL, heads=SERVED) as found:
        yield found


@pytest.fixture(scope="module")
def plain(ranks: Split) -> dict[str, Texts]:
    found = {name: ranks.generate(**params) for name, params in SAMPLING.items()}  # type: ignore[arg-type]
    assert found["greedy"] == generate(world=World(config=MODEL), **SHORT)
    return found


@pytest.mark.parametrize("name", SERVED)
def test_chains_do_not_change_the_output(ranks: Split, plain: dict[str, Texts], name: str) -> None:
    drafted = list[int]()

    def note(engine: Engine) -> None:
        drafted.append(engine.stats.speculation.drafted)

    assert ranks.generate(SplitHead(name), note, nodes=3, **SHORT) == plain["greedy"]  # type: ignore[arg-type]
    assert drafted[-1] > 0


@pytest.mark.parametrize("name", SERVED)
def test_trees_of_preempted_sequences_do_not_change_the_output(
    ranks: Split, plain: dict[str, Texts], name: str
) -> None:
    turn = iter(range(10_000))

    def preempt_some(engine: Engine) -> None:
        if next(turn) % 4 == 1 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    for sampling, params in SAMPLING.items():
        found = ranks.generate(SplitHead(name), preempt_some, 24, 5, 2, **params)  # type: ignore[arg-type]
        assert found == plain[sampling]


def test_an_abort_does_not_change_other_outputs(ranks: Split, plain: dict[str, Texts]) -> None:
    engine = ranks.engine(SplitHead("eagle"))
    tracks = [add(engine, str(i), prompt, **SHORT)[0] for i, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]
    for _ in range(3):
        engine.step()
    given_up = max(
        i for i, track in enumerate(tracks) if track.seq.finish_reason is None
    )  # others may have ended by then
    engine.abort(str(given_up))
    run(engine)
    for i, track in enumerate(tracks):
        written = track.seq.tokens[len(track.seq.request.prompt) :]
        assert written == plain["greedy"][i][: len(written)]
        assert (track.seq.finish_reason == "abort") == (i == given_up)


def test_a_rank_that_is_lost_while_a_head_drafts_is_named(tmp_path: Path) -> None:
    with split(tmp_path, 2, config=MODEL, heads={"eagle": SERVED["eagle"]}) as ranks:
        engine = ranks.engine(drafter := SplitHead("eagle"))
        add(engine, "0", [1, 2, 3])
        engine.step()
        assert isinstance(drafter.inner, HeadDrafter)
        run_op = drafter.inner.ops.run

        def run_without_one(op: object) -> object:
            os.kill(ranks.team.pids[0], signal.SIGKILL)
            assert gone(ranks.team.pids[0])
            return run_op(op)  # type: ignore[arg-type]

        drafter.inner.ops.run = run_without_one  # type: ignore[method-assign, assignment]
        with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
            for _ in range(100):
                engine.step()
