"""Which recording does a piece of work: one that is there, rather than one for which a text would have to wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from foretell.kernels.triton.row_tables import CHEAP_ROWS, NO_SPLIT, StepShape
from foretell.runner.cuda.graph_shapes import ChainSizes
from foretell.runner.cuda.graphs import OFTEN, SHARE, GraphPool, Paddable, TimingGuard, freely, plainly
from foretell.runner.heads.prefill import PrefillShape
from foretell.runner.heads.tables import DraftShape
from tests.recordings import Tape

STEPS = [
    StepShape(*each)
    for each in itertools.product((1, 8, 96, 256), (1, 8), (16, 32), (NO_SPLIT, 8, 20), (0, 32), (0, 8))
]
DRAFTS = [DraftShape(*each) for each in itertools.product((1, 8), (512, 2048), (1, 2, 3, 8), (0, 1, 10), (False, True))]
READINGS = [PrefillShape(*each) for each in itertools.product((1, 64, 256), (0, 2), (0, 8), (0, 512))]
CHAINS = [
    ChainSizes(first, 16, *each)
    for first in STEPS[::14]
    for each in itertools.product((8, 20), (1, 4), (2, 5), (9, 32), (False, True))
]
ALL: dict[str, list[Paddable]] = {"steps": STEPS, "drafts": DRAFTS, "readings": READINGS, "chains": CHAINS}  # type: ignore[dict-item]


@pytest.mark.parametrize("sizes", ALL.values(), ids=ALL)
def test_what_covers_has_room_and_costs_no_less(sizes: list[Paddable]) -> None:
    for mine in sizes:
        assert mine.covers(mine)
        for other in sizes:
            if mine != other and mine.covers(other):
                assert not other.covers(mine) and mine.price > other.price


def test_what_is_not_alike_covers_nothing() -> None:
    assert not StepShape(256, 8, 64, NO_SPLIT).covers(StepShape(256, 8, 16, 8)), "a prompt's products add up otherwise"
    assert not StepShape(256, 8, 64, 8).covers(StepShape(256, 8, 64, NO_SPLIT))
    assert StepShape(CHEAP_ROWS, 8, 16, 8).covers(StepShape(1, 1, 16, 8))
    assert not StepShape(256, 8, 16, 8).covers(StepShape(CHEAP_ROWS, 8, 16, 8)), "rows that cost"
    greedy, drawn = (ChainSizes(StepShape(1, 1, 16, 8), 16, 8, 1, 4, 32, drawn) for drawn in (False, True))
    assert not greedy.covers(drawn) and not drawn.covers(greedy), "one takes longer, the other draws nothing"
    tree = DraftShape(1, 512, 4, wide=10)
    assert not tree.covers(DraftShape(1, 512, 4)) and not DraftShape(1, 512, 4, drawn=True).covers(
        DraftShape(1, 512, 4)
    )
    assert tree.covers(DraftShape(1, 512, 2, wide=10)) and not tree.covers(DraftShape(1, 512, 1, wide=10))


@dataclass(frozen=True)
class Length:
    """Sizes that are one number."""

    number: int

    def covers(self, other: Length) -> bool:
        return self.number >= other.number

    @property
    def price(self) -> tuple[int, ...]:
        return (self.number,)


class World:
    """A recorder, its clock and what it did. To record takes a second, and all else no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.tape = 1000.0, Tape()
        monkeypatch.setattr("foretell.runner.cuda.graphs.perf_counter", lambda: self.now)
        self.recorder = self.tape.recorder()
        self.recorder.stock = GraphPool(clock=lambda: self.now)
        self.recorder._capture = self.record  # type: ignore[assignment]

    def record(self, run: Callable[[], int]) -> object:
        self.now += 1
        return self.tape(run)

    def __call__(self, number: int) -> int:
        """What work of this size was filled up to."""
        sizes = self.recorder.serving(Length(number))
        self.recorder(sizes, lambda: None)
        return sizes.number


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_where_nothing_serves_it_is_recorded_when_it_comes_again(world: World) -> None:
    assert [world(3) for _ in range(3)] == [3] * 3 and world.tape.count == 1
    assert [world(5) for _ in range(3)] == [5] * 3 and world.tape.count == 2, "nothing larger is there"


def test_the_cheapest_that_is_there_serves(world: World) -> None:
    with freely():
        assert [world(number) for number in (9, 5, 7)] == [9, 5, 7] and world.tape.count == 3
    assert [world(number) for number in (1, 5, 6, 8, 9)] == [5, 5, 7, 9, 9] and world.tape.count == 3
    with freely():
        world(6)
    assert world(6) == world(6) == 6, "and a closer one from when it is there"


def test_what_is_wished_for_often_is_recorded_and_seldom_more_than_one(world: World) -> None:
    with freely():
        world(9)
    assert {world(number) for number in (1, 2) for _ in range(2 * OFTEN)} == {9}, "it has just recorded something"
    world.now += 1 / SHARE
    assert (world(1), world(2), world(1)) == (1, 9, 1)
    world.now += 0.9 / SHARE
    assert world(2) == 9
    world.now += 0.2 / SHARE
    assert world(3) == 9 and world(2) == 2, "what came once is not worth it"
    assert world.tape.count == 3


def test_in_a_text_of_usual_length_nothing_is_recorded(world: World) -> None:
    with freely():
        world(9)
    world.now += 10 / SHARE
    assert {world(number) for number in range(1, 9) for _ in range(OFTEN - 1)} == {9} and world.tape.count == 1


def test_what_could_not_be_recorded_is_served(world: World) -> None:
    with freely():
        world(9)
    world.recorder._capture = lambda run: None  # type: ignore[assignment]
    world.now += 1 / SHARE
    assert [world(2) for _ in range(OFTEN + 1)] == [9] * (OFTEN - 1) + [2, 9]


def test_recordings_that_do_not_share_serve_nobody_else_and_come_when_all_know(world: World) -> None:
    world.recorder.stock = GraphPool(shares=False)
    with freely():
        world(9)
        assert world.tape.count == 0, "other ranks do not know that nobody waits"
        world(9)
    assert world.tape.count == 1, "but that it comes again"
    assert [world(2) for _ in range(2)] == [2, 2]


def test_who_watches_hears_of_all_that_will_not_take_as_long_again(world: World) -> None:
    heard = []
    for number in (3, 3, 3, 2):
        with TimingGuard() as outer, TimingGuard() as watch:
            world(number)
        heard.append(watch.odd)
        assert not outer.odd, "the nearest alone"
    assert heard == [True, True, False, False], "run plainly, recorded, replayed, and served by another"


def test_what_goes_on_without_a_recording_is_odd_once(world: World) -> None:
    world.recorder._capture = lambda run: None  # type: ignore[assignment]
    heard = []
    for _ in range(4):
        with TimingGuard() as watch:
            world(3)
        heard.append(watch.odd)
    assert heard == [True, False, False, False], "else nobody would learn what steps take where memory is short"


def test_what_is_never_recorded_is_not_odd(world: World) -> None:
    with TimingGuard() as watch:
        world.recorder(Length(4), lambda: None, keep=False)
    assert not watch.odd
    world.recorder._capture = None
    with TimingGuard() as watch, plainly():
        world(4)
    assert not watch.odd
