"""Streaming of a program's text."""

from __future__ import annotations

import asyncio

import pytest

from foretell import program as fp
from tests.program.test_errors import BROKEN

TWENTY = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}


@fp.function
def speak(s: fp.ProgramState) -> str:
    s += "The quick" + fp.gen("one", **TWENTY)
    s += " dog" + fp.select("which", [" jumps", " sleeps"]) + fp.gen("two", **TWENTY)
    return str(s["two"])


@pytest.fixture(params=["engine", "endpoint"])
def backend(request: pytest.FixtureRequest) -> fp.Backend:
    found: fp.Backend = request.getfixturevalue(request.param)
    return found


def test_chunks_are_the_text(backend: fp.Backend) -> None:
    state = speak.run(backend=backend, stream=True)
    chunks = list(state.text_iter())
    assert len(chunks) > 8 and "".join(chunks) == state.text()
    assert state.text() == speak.run(backend=backend).text()
    assert list(state.text_iter()) == chunks  # a later reader gets all of it too


def test_one_value_can_be_streamed(backend: fp.Backend) -> None:
    state = speak.run(backend=backend, stream=True)
    for name in ("two", "one", "which"):
        assert "".join(state.text_iter(name)) == state[name] != ""
    assert state.error() is None and state.ret_value == state["two"]


def test_a_value_not_yet_generated_is_awaited(backend: fp.Backend) -> None:
    assert speak.run(backend=backend, stream=True)["two"]


def test_on_an_event_loop(backend: fp.Backend) -> None:
    async def read() -> tuple[list[str], fp.ProgramState]:
        state = speak.run(backend=backend, stream=True)
        return [chunk async for chunk in state.text_async_iter("two")], state

    chunks, state = asyncio.run(read())
    assert len(chunks) > 2 and "".join(chunks) == state["two"]


def test_an_error_is_raised_where_the_text_ends(backend: fp.Backend) -> None:
    @fp.function
    def wrong(s: fp.ProgramState) -> None:
        s += "The quick" + fp.gen("one", **TWENTY)
        s += fp.gen("two", grammar=BROKEN)

    state = wrong.run(backend=backend, stream=True)
    chunks = []
    with pytest.raises(fp.ProgramError, match="in wrong: structured_outputs"):
        for chunk in state.text_iter():
            chunks.append(chunk)  # noqa: PERF402 - chunks before the error count
    assert "".join(chunks) == "The quick" + state["one"]
    with pytest.raises(fp.ProgramError):
        list(state.text_iter("two"))
    with pytest.raises(fp.ProgramError):
        state["three"]


def test_text_without_streaming_is_read_afterwards(backend: fp.Backend) -> None:
    state = speak.run(backend=backend)
    assert "".join(state.text_iter()) == state.text() and list(state.text_iter("one")) == [state["one"]]
