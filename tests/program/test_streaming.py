"""Reading along while a program runs."""

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


def test_pieces_are_the_text(backend: fp.Backend) -> None:
    state = speak.run(backend=backend, stream=True)
    pieces = list(state.text_iter())
    assert len(pieces) > 8 and "".join(pieces) == state.text()
    assert state.text() == speak.run(backend=backend).text()
    assert list(state.text_iter()) == pieces  # whoever comes later gets all of it too


def test_one_value_can_be_followed(backend: fp.Backend) -> None:
    state = speak.run(backend=backend, stream=True)
    for name in ("two", "one", "which"):
        assert "".join(state.text_iter(name)) == state[name] != ""
    assert state.error() is None and state.ret_value == state["two"]


def test_a_value_that_is_still_to_come_is_waited_for(backend: fp.Backend) -> None:
    assert speak.run(backend=backend, stream=True)["two"]


def test_on_an_event_loop(backend: fp.Backend) -> None:
    async def read() -> tuple[list[str], fp.ProgramState]:
        state = speak.run(backend=backend, stream=True)
        return [piece async for piece in state.text_async_iter("two")], state

    pieces, state = asyncio.run(read())
    assert len(pieces) > 2 and "".join(pieces) == state["two"]


def test_an_error_comes_where_the_text_breaks_off(backend: fp.Backend) -> None:
    @fp.function
    def wrong(s: fp.ProgramState) -> None:
        s += "The quick" + fp.gen("one", **TWENTY)
        s += fp.gen("two", grammar=BROKEN)

    state = wrong.run(backend=backend, stream=True)
    pieces = []
    with pytest.raises(fp.ProgramError, match="in wrong: structured_outputs"):
        for piece in state.text_iter():
            pieces.append(piece)  # noqa: PERF402 - what came before the error counts
    assert "".join(pieces) == "The quick" + state["one"]
    with pytest.raises(fp.ProgramError):
        list(state.text_iter("two"))
    with pytest.raises(fp.ProgramError):
        state["three"]


def test_what_is_not_streamed_is_read_afterwards(backend: fp.Backend) -> None:
    state = speak.run(backend=backend)
    assert "".join(state.text_iter()) == state.text() and list(state.text_iter("one")) == [state["one"]]
