"""Sequences with a common prefix that arrive together: one prefills it, the others share its pages."""

from __future__ import annotations

import pytest

from tests.tiny import World, add, run

LONG = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]  # three pages of four and a token
TAILS = [[21, 22], [23], [24, 25, 26]]


def generated(world: World, prompts: list[list[int]]) -> tuple[list[list[int]], int, list[int]]:
    """Return the tokens, the rows that were run, and the cached tokens of each prompt."""
    engine = world.engine()
    states = [state for i, prompt in enumerate(prompts) for state in add(engine, str(i), prompt, ignore_eos=True)]
    run(engine)
    return [state.seq.tokens for state in states], engine.stats.rows, [state.cached_prompt_tokens for state in states]


def test_a_shared_prefix_is_prefilled_once() -> None:
    prompts = [LONG + tail for tail in TAILS]
    shared, rows, cached = generated(World(), prompts)
    alone, more, nothing = generated(World(prefix_cache=False), prompts)
    assert shared == alone
    assert cached == [0, 12, 12] and nothing == [0, 0, 0]
    assert more - rows == 2 * 12


def test_a_sequence_waits_for_a_long_prefix_as_far_as_it_is_shared() -> None:
    prompts = [LONG * 5, LONG + [30], LONG * 2 + [31], [9] * 9]
    shared, _, cached = generated(World(max_step_tokens=16), prompts)
    assert shared == generated(World(max_step_tokens=16, prefix_cache=False), prompts)[0]
    assert cached == [0, 12, 24, 0]


def test_sequences_without_a_shared_page_do_not_wait() -> None:
    engine = World().engine()
    for i, prompt in enumerate(([1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [5, 2, 3, 4, 5, 6])):  # less than a page, or other
        add(engine, str(i), prompt)
    engine.step()
    assert len(engine.scheduler.running) == 4
    run(engine)


@pytest.mark.parametrize("pages", [12, 16, 24])
def test_all_sequences_finish_if_pages_run_short(pages: int) -> None:
    prompts = [LONG + tail for tail in TAILS * 3]
    shared, _, _ = generated(World(pages=pages, max_num_seqs=8), prompts)
    assert shared == generated(World(prefix_cache=False), prompts)[0]
