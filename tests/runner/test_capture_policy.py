"""Which graph serves a shape: a captured one, rather than one that a request would have to wait for."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from foretell.kernels.triton.row_tables import CHEAP_ROWS, NO_SPLIT, StepShape
from foretell.runner.cuda.graph_shapes import ChainShape
from foretell.runner.cuda.graphs import (
    CAPTURE_AFTER,
    MAX_CAPTURE_TIME,
    CapturePolicy,
    Paddable,
    TimingGuard,
    capture_now,
    no_capture,
)
from foretell.runner.heads.prefill import PrefillShape
from foretell.runner.heads.tables import DraftShape
from tests.fake_graphs import FakeCapture

STEPS = [
    StepShape(*each)
    for each in itertools.product((1, 8, 96, 256), (1, 8), (16, 32), (NO_SPLIT, 8, 20), (0, 32), (0, 8))
]
DRAFTS = [DraftShape(*each) for each in itertools.product((1, 8), (512, 2048), (1, 2, 3, 8), (0, 1, 10), (False, True))]
READINGS = [PrefillShape(*each) for each in itertools.product((1, 64, 256), (0, 2), (0, 8), (0, 512))]
CHAINS = [
    ChainShape(first, 16, *each)
    for first in STEPS[::14]
    for each in itertools.product((8, 20), (1, 4), (2, 5), (9, 32), (False, True))
]
ALL: dict[str, list[Paddable]] = {"steps": STEPS, "drafts": DRAFTS, "readings": READINGS, "chains": CHAINS}  # type: ignore[dict-item]


@pytest.mark.parametrize("sizes", ALL.values(), ids=ALL)
def test_a_covering_shape_costs_more(sizes: list[Paddable]) -> None:
    for mine in sizes:
        assert mine.covers(mine)
        for other in sizes:
            if mine != other and mine.covers(other):
                assert not other.covers(mine) and mine.padded_size > other.padded_size


def test_shapes_of_different_kinds_do_not_cover_each_other() -> None:
    assert not StepShape(256, 8, 64, NO_SPLIT).covers(StepShape(256, 8, 16, 8)), (
        "matrix products of a prefill add up differently"
    )
    assert not StepShape(256, 8, 64, 8).covers(StepShape(256, 8, 64, NO_SPLIT))
    assert StepShape(CHEAP_ROWS, 8, 16, 8).covers(StepShape(1, 1, 16, 8))
    assert not StepShape(256, 8, 16, 8).covers(StepShape(CHEAP_ROWS, 8, 16, 8)), "so many more rows cost time"
    greedy, sampled = (ChainShape(StepShape(1, 1, 16, 8), 16, 8, 1, 4, 32, sampled) for sampled in (False, True))
    assert not greedy.covers(sampled) and not sampled.covers(greedy), "one takes longer, the other does not sample"
    tree = DraftShape(1, 512, 4, width=10)
    assert not tree.covers(DraftShape(1, 512, 4)) and not DraftShape(1, 512, 4, sampled=True).covers(
        DraftShape(1, 512, 4)
    )
    assert tree.covers(DraftShape(1, 512, 2, width=10)) and not tree.covers(DraftShape(1, 512, 1, width=10))


@dataclass(frozen=True)
class Length:
    """A shape of one number."""

    number: int

    def covers(self, other: Length) -> bool:
        return self.number >= other.number

    @property
    def padded_size(self) -> tuple[int, ...]:
        return (self.number,)


class World:
    """A graph cache and its clock. A capture takes a second, everything else no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.tape, self.collects = 1000.0, FakeCapture(), True
        monkeypatch.setattr("foretell.runner.cuda.graphs.perf_counter", lambda: self.now)
        self.recorder = self.tape.recorder()
        self.recorder.policy = CapturePolicy(clock=lambda: self.now)
        self.recorder._capture = self  # type: ignore[assignment]

    def capture(self, run: Callable[[], int]) -> object:
        self.now += 1
        self.collects = gc.isenabled()
        return self.tape.capture(run)

    def __call__(self, number: int) -> int:
        """Run work of this shape and return the shape it was padded to."""
        sizes = self.recorder.select(Length(number))
        self.recorder(sizes, lambda: None)
        return sizes.number


class NoMemory:
    """A capture that fails for lack of memory."""

    def capture(self, run: Callable[[], int]) -> None:
        return None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_shape_that_no_graph_covers_is_captured_at_its_second_run(world: World) -> None:
    assert [world(3) for _ in range(3)] == [3] * 3 and world.tape.count == 1
    assert [world(5) for _ in range(3)] == [5] * 3 and world.tape.count == 2, "there is no larger graph"


def test_no_garbage_is_collected_during_a_capture(world: World) -> None:
    """Destroying a CUDA graph without references would end the capture."""
    assert gc.isenabled()
    world(3), world(3)
    assert world.tape.count == 1 and not world.collects and gc.isenabled()


def test_the_cheapest_covering_graph_serves(world: World) -> None:
    with capture_now():
        assert [world(number) for number in (9, 5, 7)] == [9, 5, 7] and world.tape.count == 3
    assert [world(number) for number in (1, 5, 6, 8, 9)] == [5, 5, 7, 9, 9] and world.tape.count == 3
    with capture_now():
        world(6)
    assert world(6) == world(6) == 6, "a closer graph serves as soon as it exists"


def test_a_frequent_shape_is_captured_and_captures_are_rate_limited(world: World) -> None:
    with capture_now():
        world(9)
    assert {world(number) for number in (1, 2) for _ in range(2 * CAPTURE_AFTER)} == {9}, (
        "there was a capture just before"
    )
    world.now += 1 / MAX_CAPTURE_TIME
    assert (world(1), world(2), world(1)) == (1, 9, 1)
    world.now += 0.9 / MAX_CAPTURE_TIME
    assert world(2) == 9
    world.now += 0.2 / MAX_CAPTURE_TIME
    assert world(3) == 9 and world(2) == 2, "a shape that came once is not captured"
    assert world.tape.count == 3


def test_a_request_of_usual_length_causes_no_capture(world: World) -> None:
    with capture_now():
        world(9)
    world.now += 10 / MAX_CAPTURE_TIME
    assert {world(number) for number in range(1, 9) for _ in range(CAPTURE_AFTER - 1)} == {9} and world.tape.count == 1


def test_a_larger_graph_serves_after_a_failed_capture(world: World) -> None:
    with capture_now():
        world(9)
    world.recorder._capture = NoMemory()  # type: ignore[assignment]
    world.now += 1 / MAX_CAPTURE_TIME
    assert [world(2) for _ in range(CAPTURE_AFTER + 1)] == [9] * (CAPTURE_AFTER - 1) + [2, 9]


def test_without_sharing_each_shape_is_captured_when_all_ranks_know(world: World) -> None:
    world.recorder.policy = CapturePolicy(allow_larger=False)
    with capture_now():
        world(9)
        assert world.tape.count == 0, "other ranks do not know about the warm-up"
        world(9)
    assert world.tape.count == 1, "but they know that the shape came before"
    assert [world(2) for _ in range(2)] == [2, 2]


def test_captures_and_first_eager_runs_are_outliers(world: World) -> None:
    heard = []
    for number in (3, 3, 3, 2):
        with TimingGuard() as outer, TimingGuard() as watch:
            world(number)
        heard.append(watch.is_outlier)
        assert not outer.is_outlier, "only the innermost guard is marked"
    assert heard == [True, True, False, False], "eager, captured, replayed, served by a larger graph"


def test_work_whose_capture_fails_is_an_outlier_once(world: World) -> None:
    world.recorder._capture = NoMemory()  # type: ignore[assignment]
    heard = []
    for _ in range(4):
        with TimingGuard() as watch:
            world(3)
        heard.append(watch.is_outlier)
    assert heard == [True, False, False, False], "otherwise the cost model would learn nothing when memory is short"


def test_work_that_is_never_captured_is_no_outlier(world: World) -> None:
    with TimingGuard() as watch:
        world.recorder(Length(4), lambda: None, keep=False)
    assert not watch.is_outlier
    world.recorder._capture = None
    with TimingGuard() as watch, no_capture():
        world(4)
    assert not watch.is_outlier
