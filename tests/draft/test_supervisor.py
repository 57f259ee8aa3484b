"""A drafter that fails pauses, with a back-off, and comes back."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

import pytest

from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.supervisor import (
    FIRST_PAUSE,
    LOG_INTERVAL,
    LONGEST_PAUSE,
    TOLERATED,
    Backoff,
    Supervisor,
    comes_from_signal,
)
from foretell.engine.engine import Engine
from foretell.types import Budget, Draft, Sequence, StepResult
from tests.tiny import PROMPTS, World, add, generate


class Clock:
    """A clock that is moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Faulty(Drafter):
    """Fails in one method while `broken` is set."""

    name = "faulty"

    def __init__(self, method: str = "propose") -> None:
        self.method, self.broken, self.calls = method, True, 0

    def _enter(self, method: str) -> None:
        if method == self.method:
            self.calls += 1
            if self.broken:
                raise RuntimeError("out of memory")

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        self._enter("propose")
        return [Draft.chain([1] * budget.nodes, self.name) for budget in budgets]

    def observe(self, outcomes: list[StepResult]) -> None:
        self._enter("observe")


def alone(drafter: Drafter, supervisor: Supervisor) -> Engine:
    return World().engine(MixDrafter([drafter], supervisor=supervisor))


def in_a_mix(drafter: Drafter, supervisor: Supervisor) -> Engine:
    return World().engine(MixDrafter([drafter, NGramDrafter(1, 3)], ("faulty",), supervisor))


BOTH = pytest.mark.parametrize("make", [alone, in_a_mix])
Make = Callable[[Drafter, Supervisor], Engine]


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        if not engine.busy:
            add(engine, str(engine.stats.forwards), PROMPTS[0], ignore_eos=True)
        engine.step()


def test_the_pause_doubles_up_to_a_limit_and_a_success_resets_it() -> None:
    clock = Clock()
    backoff = Backoff(clock, tolerated=2, first=1.0, longest=10.0)
    assert [backoff.fail() for _ in range(7)] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert backoff.waiting
    clock.now += 10.0
    assert not backoff.waiting
    assert backoff.fail() == 10.0
    backoff.succeed()
    assert not backoff.waiting and backoff.fail() == 0.0
    for _ in range(5000):
        assert backoff.fail() <= 10.0


@BOTH
@pytest.mark.parametrize("method", ["propose", "observe"])
def test_a_drafter_that_failed_comes_back(make: Make, method: str) -> None:
    clock, drafter = Clock(), Faulty(method)
    engine = make(drafter, Supervisor(clock))
    steps(engine, 20)
    assert drafter.calls == TOLERATED + 1 == engine.safe_drafter.failures
    assert engine.drafter.unavailable == engine.safe_drafter.supervisor.disabled == {"faulty"}
    clock.now += FIRST_PAUSE
    assert not engine.drafter.unavailable
    steps(engine, 20)
    assert drafter.calls == TOLERATED + 2, "one attempt, and the next pause is longer"
    clock.now += FIRST_PAUSE
    steps(engine, 20)
    assert drafter.calls == TOLERATED + 2
    clock.now += FIRST_PAUSE
    drafter.broken = False
    drafted = engine.stats.speculation.drafted
    steps(engine, 20)
    assert engine.stats.speculation.drafted > drafted and not engine.drafter.unavailable
    drafter.broken = True
    before = drafter.calls
    steps(engine, 20)
    assert drafter.calls == before + TOLERATED + 1, "a success has reset the back-off"
    assert engine.drafter.unavailable == {"faulty"}


@BOTH
def test_failures_far_apart_never_disable_a_drafter(make: Make) -> None:
    drafter = Faulty()
    engine = make(drafter, Supervisor(Clock()))
    for _ in range(4 * TOLERATED):
        drafter.broken = True
        steps(engine, 2)
        drafter.broken = False
        steps(engine, 4)
    assert engine.safe_drafter.failures >= 4 * TOLERATED and not engine.drafter.unavailable


@BOTH
def test_a_disabled_drafter_costs_no_text_and_no_other_drafter(make: Make) -> None:
    truth = generate()
    engine = make(Faulty(), Supervisor(Clock()))
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt)]
    while engine.busy:
        engine.step()
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth
    mix = World().engine(MixDrafter([Faulty(), NGramDrafter(1, 3)], supervisor=Supervisor(Clock())))
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(mix, str(i), prompt)]
    while mix.busy:
        mix.step()
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth
    assert mix.stats.speculation.by_drafter["ngram"].drafted > 0 and mix.drafter.unavailable == {"faulty"}


def test_bookkeeping_goes_on_while_drafts_pause() -> None:
    supervisor = Supervisor(Clock())
    for _ in range(TOLERATED + 1):
        supervisor.fail("d", "propose", ValueError("x"))
    done: list[str] = []
    for method in ("propose", "free_drafts", "prepare", "update_kv", "observe"):
        supervisor.call("d", method, lambda method=method: done.append(method), None)  # type: ignore[misc]
    assert done == ["update_kv", "observe"]
    supervisor.call("other", "propose", lambda: done.append("other"), None)
    supervisor.call("d", "forget", lambda: done.append("forget"), None, always=True)
    assert done[2:] == ["other", "forget"]


def test_logs_say_when_a_drafter_is_disabled_and_enabled_and_do_not_flood(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    supervisor = Supervisor(clock)

    def fail() -> None:
        raise ValueError("planted")

    for _ in range(1000):
        supervisor.call("d", "propose", fail, None)
    assert len(caplog.records) == 2
    assert "drafter d failed in propose" in caplog.text and caplog.records[0].exc_info
    assert "disabled for 1 s: propose failed 3 times in a row: ValueError: planted" in caplog.text
    caplog.clear()
    clock.now += FIRST_PAUSE
    supervisor.call("d", "propose", lambda: None, None)
    assert caplog.messages == ["drafter d is enabled again: propose succeeded"]
    caplog.clear()
    for _ in range(1000):  # never three in a row, so never disabled
        supervisor.call("d", "propose", fail, None)
        supervisor.call("d", "propose", lambda: None, None)
        clock.now += 2 * LOG_INTERVAL / 1000
    assert len(caplog.records) == 2 and supervisor.failures["d"] == TOLERATED + 1001
    assert LONGEST_PAUSE > LOG_INTERVAL


def test_failures_during_a_pause_neither_prolong_nor_log_it(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    supervisor = Supervisor(clock)

    def fail() -> None:
        raise ValueError("planted")

    for _ in range(1000):  # `follow` is called during the pause as well
        supervisor.call("d", "update_kv", fail, None, always=True)
    assert len(caplog.records) == 2 and supervisor.failures["d"] == 1000
    clock.now += FIRST_PAUSE
    assert not supervisor.disabled


def test_only_the_main_thread_is_interrupted() -> None:
    found: list[bool] = []
    errors = (KeyboardInterrupt(), SystemExit(), GeneratorExit(), ValueError())
    thread = threading.Thread(target=lambda: found.extend(map(comes_from_signal, errors)))
    thread.start()
    thread.join()
    assert found == [False] * 4
    assert [comes_from_signal(error) for error in errors] == [True, False, False, False]


class Timeout(BaseException):
    """Raised by a handler of the program."""


@pytest.mark.parametrize("error", [SystemExit(0), Timeout()])
def test_what_a_signal_handler_raises_ends_the_program(error: BaseException) -> None:
    def leave(number: int, frame: object) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, leave)
    supervisor = Supervisor(Clock())
    try:
        with pytest.raises(type(error)):
            supervisor.call("d", "propose", lambda: signal.raise_signal(signal.SIGUSR1), None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not supervisor.failures

    def own_exit() -> None:
        raise SystemExit(1)

    supervisor.call("d", "propose", own_exit, None)
    assert supervisor.failures["d"] == 1
