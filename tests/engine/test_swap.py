"""Texts that make way and come back by copy are what they would be if they were read again."""

from __future__ import annotations

from foretell.engine.engine import Engine
from foretell.kv.swap import LEAST_READ, TRIALS, Swap
from tests.tiny import PROMPTS, World, add, generate, model_drafter, run

TIGHT = World(page_size=4, pages=14, max_num_seqs=5, prefix_cache=False)


def swapping(room: int = 1 << 30, drafts: bool = False, world: World = TIGHT) -> tuple[Engine, Swap]:
    engine = world.engine(model_drafter(seed=5) if drafts else None)
    engine.scheduler.swap = swap = Swap(engine.runner.cache, room)
    return engine, swap


def written(engine: Engine) -> list[list[int]]:
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt)]
    run(engine)
    return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


def test_a_copied_text_goes_on_as_if_it_had_stayed() -> None:
    truth = generate(None, World())
    for drafts in (False, True):
        for prefix in (False, True):
            engine, swap = swapping(drafts=drafts, world=World(page_size=4, pages=14, prefix_cache=prefix))
            assert written(engine) == truth
            assert engine.scheduler.preemptions > 0
            assert swap.brought_back > 0
            assert swap.used == 0, "nothing is left behind"


def test_what_is_brought_back_is_not_read_again() -> None:
    engine, swap = swapping()
    written(engine)
    plain = TIGHT.engine()
    written(plain)
    assert swap.brought_back > 0
    assert engine.stats.rows < plain.stats.rows


def test_without_room_texts_are_read_again() -> None:
    engine, swap = swapping(room=1)
    assert written(engine) == generate(None, World())
    assert swap.kept == 0


def test_copies_are_made_only_where_they_are_faster() -> None:
    engine, swap = swapping()
    assert swap.pays, "tried while nothing is known"
    swap._copying = [1e-3] * TRIALS
    swap.observe(LEAST_READ, LEAST_READ * 1e-4)
    assert not swap.pays
    for _ in range(50):
        swap.observe(LEAST_READ, LEAST_READ * 1e-2)
    assert swap.pays
    swap.observe(LEAST_READ - 1, 0.0)
    assert swap.pays, "too few tokens tell nothing"
