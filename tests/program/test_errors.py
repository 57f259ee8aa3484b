"""Errors in programs: their line, which branches fail, and that nothing leaks."""

from __future__ import annotations

import _thread
import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretell import program as fp
from foretell.errors import ForetellError, RequestError
from foretell.types import Delta
from tests.program.counting import forwards
from tests.program.test_one_batch import continue_text
from tests.waiting import TIMEOUT, wait_for

LONG_GEN = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
BROKEN = 'start: "a" nothing'  # refers to a missing rule


def line(program: fp.Function, offset: int) -> str:
    """Return a line of a program, counted from its decorator."""
    return f"{Path(__file__).name}:{program.program.__code__.co_firstlineno + offset} in {program.__name__}:"


def test_a_generation_that_fails_names_its_line(engine: fp.Engine) -> None:
    @fp.function
    def wrong(s: fp.ProgramState) -> None:
        s += "The"
        s += fp.gen("x", grammar=BROKEN)
        s += fp.gen("y")

    with pytest.raises(fp.ProgramError) as caught:
        wrong(backend=engine)
    assert line(wrong, 3) in str(caught.value) and "structured_outputs.lark" in str(caught.value)
    assert isinstance(caught.value.__cause__, RequestError)


def test_an_invalid_setting_names_its_line(engine: fp.Engine) -> None:
    @fp.function
    def wrong(s: fp.ProgramState) -> None:
        s += "The"
        s += fp.gen("x", temperature=-1)

    with pytest.raises(fp.ProgramError, match="temperature: must be 0") as caught:
        wrong(backend=engine)
    assert line(wrong, 3) in str(caught.value)


def test_a_prompt_beyond_the_context_is_refused(engine: fp.Engine) -> None:
    @fp.function
    def long(s: fp.ProgramState) -> None:
        s += "The quick" * 2000
        s += fp.gen("x")

    with pytest.raises(fp.ProgramError, match="this model takes at most 1023") as caught:
        long(backend=engine)
    assert line(long, 3) in str(caught.value)


def test_the_programs_own_exceptions_keep_their_type(engine: fp.Engine) -> None:
    @fp.function
    def wrong(s: fp.ProgramState) -> None:
        s += "The" + fp.gen("x", **LONG_GEN)
        s += str(1 / 0)

    with pytest.raises(ZeroDivisionError) as caught:
        wrong(backend=engine)
    assert line(wrong, 3)[:-1] in caught.value.__notes__[0]
    (state,) = wrong.run_batch([{}], backend=engine)
    assert line(wrong, 3) + " ZeroDivisionError: division by zero" in str(state.error())
    with pytest.raises(fp.ProgramError):
        state["x"]


def test_a_failing_branch_does_not_affect_the_others(engine: fp.Engine) -> None:
    @fp.function
    def branches(s: fp.ProgramState) -> list[Exception | None]:
        s += "The quick"
        forks = s.fork(3)
        forks[1] += fp.gen("x", grammar=BROKEN)
        for branch in (forks[0], forks[2]):
            branch += fp.gen("x", max_tokens=5, ignore_eos=True)
        forks.join()
        with pytest.raises(fp.ProgramError, match=line(branches, 4)):
            forks[1]["x"]
        with pytest.raises(fp.ProgramError):
            forks[1] += "more"
        s += " and so on" + fp.gen("y", max_tokens=5, ignore_eos=True)
        return [branch.error() for branch in forks]

    state = branches.run(backend=engine)
    assert state["x"][0] and state["x"][1] is None and state["x"][2] and state["y"]
    assert state.get_meta_info("x")[1] is None
    assert [error is None for error in state.ret_value] == [True, False, True]


def test_a_failed_state_fails_its_queued_branches(engine: fp.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    async def fail(*_: object) -> None:
        await asyncio.to_thread(asked.wait, TIMEOUT)
        raise ForetellError("not today")

    @fp.function
    def program(s: fp.ProgramState) -> None:
        s += "The" + fp.gen("x")
        forks = s.fork(2)
        forks += fp.gen("y")
        s += fp.gen("z")
        asked.set()
        forks.join()
        assert s["y"] == [None, None]
        for read in (forks[1].text, lambda: forks[0]["y"], lambda: s["z"]):
            with pytest.raises(fp.ProgramError, match=line(program, 2) + " not today"):
                read()

    monkeypatch.setattr(engine, "generate", fail)
    with pytest.raises(fp.ProgramError, match="not today"):
        program(backend=engine)


def test_a_failing_run_does_not_affect_the_others(engine: fp.Engine) -> None:
    @fp.function
    def fail_on_every_second(s: fp.ProgramState, i: int) -> int:
        s += f"The {i}" + fp.gen("x", max_tokens=5, ignore_eos=True)
        if i % 2:
            raise ValueError(f"{s['x']!r} is odd")
        return i

    states = fail_on_every_second.run_batch([{"i": i} for i in range(6)], backend=engine)
    assert [state.ret_value for state in states] == [0, None, 2, None, 4, None]
    assert [state.error() is None for state in states] == [True, False] * 3
    assert "ValueError" in str(states[1].error()) and states[2]["x"]


def test_cancelling_frees_the_pages(engine: fp.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    @fp.function
    def long(s: fp.ProgramState) -> None:
        s += "The"
        forks = s.fork(4)
        forks += fp.gen("x", **LONG_GEN)
        forks.join()

    inner, release = engine.llm.engine, threading.Event()
    step = inner.step

    def held() -> list[Delta]:
        """Slow down, so that no generation ends before it is cancelled."""
        if len(inner.scheduler.running) == 4:
            release.wait(TIMEOUT)
        return step()

    monkeypatch.setattr(inner, "step", held)
    with forwards(engine) as count:
        state = long.run(backend=engine, stream=True)
        wait_for(lambda: len(inner.scheduler.running) == 4)
        state.cancel()
        assert isinstance(state.error(), fp.Cancelled)
        release.set()
        wait_for(lambda: not inner.busy and inner.runner.pool.num_held == 0)
    assert count.made < LONG_GEN["max_tokens"] * 0.8
    with pytest.raises(fp.Cancelled):
        list(state.text_iter())
    state.cancel()  # a second time has no effect


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore the signal, which the parent process may ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_batch_ends_at_once(engine: fp.Engine) -> None:
    began = threading.Barrier(4)

    @fp.function
    def long(s: fp.ProgramState, i: int) -> None:
        s += f"The {i}" + fp.gen("x", **LONG_GEN)
        if i < 4:
            began.wait(TIMEOUT)
        if i == 0:
            _thread.interrupt_main()
        s["x"]

    with pytest.raises(KeyboardInterrupt):
        long.run_batch([{"i": i} for i in range(200)], backend=engine, num_threads=4)
    wait_for(lambda: not engine.llm.engine.busy)


def test_an_endless_program_is_stopped(engine: fp.Engine) -> None:
    rounds = []

    @fp.function
    def forever(s: fp.ProgramState) -> None:
        s += "The"
        while rounds.append("gen") is None:
            s += fp.gen("x", max_tokens=1)

    @fp.function
    def bomb(s: fp.ProgramState) -> None:
        s += "The"
        while rounds.append("fork") is None:
            s.fork(100)

    for program in (forever, bomb):
        with pytest.raises(fp.ProgramError, match="more than 250 generations and branches") as caught:
            program(backend=engine, max_generations=250)
        assert line(program, 4) in str(caught.value)
    assert (rounds.count("gen"), rounds.count("fork")) == (251, 3)

    @fp.function
    def reading(s: fp.ProgramState) -> None:
        s += "z" * 950
        while True:
            s += fp.gen("x", max_tokens=1)
            s["x"]

    with pytest.raises(fp.ProgramError, match="leaves? no|takes at most|left after the prompt"):
        reading(backend=engine)  # the model's context ends it


def test_many_threads_get_what_each_gets_alone(engine: fp.Engine) -> None:
    @fp.function
    def busy(s: fp.ProgramState, i: int) -> str:
        s += f"The {i % 5}" + fp.gen("a", max_tokens=4, ignore_eos=True, temperature=0)
        forks = s.fork(2)
        forks += [" fox", " dog"]
        forks += fp.gen("b", max_tokens=3, ignore_eos=True, temperature=0)
        forks.join()
        s += fp.select("c", s["b"]) if len(set(s["b"])) == 2 and all(s["b"]) else "."
        return s.text()

    states = busy.run_batch([{"i": i} for i in range(40)], backend=engine, num_threads=30)
    alone = [busy(i, backend=engine) for i in range(5)]
    assert [state.ret_value for state in states] == alone * 8


def test_a_closed_engine_ends_its_programs(folder: Path) -> None:
    engine = fp.Engine(folder, drafter="none", quiet=True)
    inner = engine.llm.engine
    state = continue_text.run("fox", backend=engine, stream=True, max_tokens=900)
    wait_for(lambda: inner.busy or "x" in state)
    engine.close()
    assert state.error() is None or isinstance(state.error(), fp.Cancelled | fp.ProgramError)
    assert not inner.busy and inner.runner.pool.num_held == 0
    with pytest.raises(ForetellError, match="is closed"):
        continue_text("fox", backend=engine)
    engine.close()


def test_the_bar_counts_runs(engine: fp.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    continue_text.run_batch([{"of": "fox"}] * 3, backend=engine, progress_bar=True)
    err = capsys.readouterr().err
    assert err.startswith("continue_text ") and "100%" in err
    continue_text.run_batch([{"of": "fox"}], backend=engine)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_threads": 0}, "num_threads: must be"),
        ({"max_generations": 0}, "max_generations: must be"),
        ({"stream": True}, "no option 'stream'"),
        ({"of": "fox"}, "no option 'of'"),
    ],
)
def test_wrong_options_of_a_batch_are_refused(engine: fp.Engine, options: dict[str, object], reason: str) -> None:
    with pytest.raises((RequestError, TypeError), match=reason):
        continue_text.run_batch([{"of": "fox"}], backend=engine, **options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="list of arguments by name"):
        continue_text.run_batch(["fox"], backend=engine)  # type: ignore[list-item]
