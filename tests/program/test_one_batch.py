"""Independent generations run as one batch, and their common prefix is prefilled once."""

from __future__ import annotations

import pytest

from foretell import program as fp
from tests.program.counting import all_at_once, forwards

LONG = "The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore. " * 3
TOKENS = 24
SAMPLED = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.8}
PAGE = 16


@fp.function
def continue_text(s: fp.ProgramState, of: str, before: str = "") -> None:
    s += f"{before}{of}" + fp.gen("x", **SAMPLED)


@fp.function
def split(s: fp.ProgramState, before: str, branches: int) -> None:
    s += before
    forks = s.fork(branches)
    for i, branch in enumerate(forks):
        branch += f" {i}" + fp.gen("x", **SAMPLED)
    forks.join()


def test_programs_of_a_batch_are_one_batch(engine: fp.Engine) -> None:
    runs = [{"of": f"{i} fox"} for i in range(64)]
    with forwards(engine) as count, all_at_once(engine, 64):
        states = continue_text.run_batch(runs, backend=engine, seed=1)
    assert count.made == TOKENS
    assert [state["x"] for state in states[::9]] == [
        continue_text(of, backend=engine, seed=state.seed)["x"]
        for of, state in ((f"{i} fox", states[i]) for i in range(0, 64, 9))
    ]


def test_the_common_prefix_of_branches_is_prefilled_once(engine: fp.Engine) -> None:
    engine.llm.engine.scheduler.prefix.clear()  # type: ignore[union-attr]
    stats, shared = engine.llm.engine.stats, len(engine.llm.tokenizer.encode(LONG))
    rows = stats.rows
    with forwards(engine) as count, all_at_once(engine, 8):
        state = split(LONG, 8, backend=engine)
    assert count.made == TOKENS + 1  # the first prefills the prefix, the others reuse it
    cached = [meta["cached_tokens"] for meta in state.get_meta_info("x")]
    assert sorted(cached) == [0] + [shared // PAGE * PAGE] * 7
    assert stats.rows - rows < shared + 8 * (PAGE + TOKENS + 2)


def test_the_common_prefix_of_programs_is_prefilled_once(engine: fp.Engine) -> None:
    engine.llm.engine.scheduler.prefix.clear()  # type: ignore[union-attr]
    with all_at_once(engine, 16):
        states = continue_text.run_batch([{"of": str(i), "before": LONG} for i in range(16)], backend=engine)
    cached = [state.get_meta_info("x")["cached_tokens"] for state in states]
    shared = len(engine.llm.tokenizer.encode(LONG)) // PAGE * PAGE
    assert sorted(cached) == [0] + [shared] * 15


def test_a_growing_state_is_prefilled_once(engine: fp.Engine) -> None:
    @fp.function
    def grow(s: fp.ProgramState) -> None:
        s += LONG
        for i in range(4):
            s += f" {i}" + fp.gen(f"x{i}", **SAMPLED)

    state = grow(backend=engine)
    metas = [state.get_meta_info(f"x{i}") for i in range(4)]
    assert all(
        later["cached_tokens"] >= before["prompt_tokens"] - PAGE
        for before, later in zip(metas, metas[1:], strict=False)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_applies_to_all_and_changes_nothing(
    engine: fp.Engine, speculating: fp.Engine, temperature: float
) -> None:
    @fp.function
    def long(s: fp.ProgramState, of: str) -> None:
        s += LONG + of + fp.gen("x", max_tokens=64, temperature=temperature, ignore_eos=True)

    runs = [{"of": f"{i} fox"} for i in range(12)]
    plain = long.run_batch(runs, backend=engine, seed=3)
    speculated = long.run_batch(runs, backend=speculating, seed=3)
    assert [state["x"] for state in plain] == [state["x"] for state in speculated]
    metas = [state.get_meta_info("x") for state in speculated]
    assert sum(meta["drafted"] > 0 for meta in metas) > 3
    assert temperature or sum(meta["accepted"] for meta in metas) > 0
