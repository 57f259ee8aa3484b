"""Texts that begin alike and come together: one reads the beginning, the others come to its pages."""

from __future__ import annotations

import pytest

from tests.tiny import World, add, run

LONG = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]  # three pages of four and a token
TAILS = [[21, 22], [23], [24, 25, 26]]


def written(world: World, prompts: list[list[int]]) -> tuple[list[list[int]], int, list[int]]:
    """The texts, the rows that were run, and how much of each prompt was found."""
    engine = world.engine()
    tracks = [track for i, prompt in enumerate(prompts) for track in add(engine, str(i), prompt, ignore_eos=True)]
    run(engine)
    return [track.seq.tokens for track in tracks], engine.stats.rows, [track.cached_prompt_tokens for track in tracks]


def test_a_beginning_is_read_once() -> None:
    prompts = [LONG + tail for tail in TAILS]
    shared, rows, cached = written(World(), prompts)
    alone, more, nothing = written(World(prefix_cache=False), prompts)
    assert shared == alone
    assert cached == [0, 12, 12] and nothing == [0, 0, 0]
    assert more - rows == 2 * 12


def test_a_long_beginning_is_awaited_as_far_as_it_is_shared() -> None:
    prompts = [LONG * 5, LONG + [30], LONG * 2 + [31], [9] * 9]
    shared, _, cached = written(World(max_step_tokens=16), prompts)
    assert shared == written(World(max_step_tokens=16, prefix_cache=False), prompts)[0]
    assert cached == [0, 12, 24, 0]


def test_nobody_waits_for_what_is_not_shared() -> None:
    engine = World().engine()
    for i, prompt in enumerate(([1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [5, 2, 3, 4, 5, 6])):  # less than a page, or other
        add(engine, str(i), prompt)
    engine.step()
    assert len(engine.scheduler.running) == 4
    run(engine)


@pytest.mark.parametrize("pages", [12, 16, 24])
def test_where_pages_run_short_all_still_come_to_their_end(pages: int) -> None:
    prompts = [LONG + tail for tail in TAILS * 3]
    shared, _, _ = written(World(pages=pages, max_num_seqs=8), prompts)
    assert shared == written(World(prefix_cache=False), prompts)[0]
