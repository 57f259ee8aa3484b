"""One request takes the walk that docs/explanation/architecture.md describes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly, build_engine
from foretell.config import EngineConfig, SpeculationConfig
from foretell.kernels.native.library import library
from foretell.server.service import Service
from tests.server.in_process import run_app
from tests.test_architecture import HOPS, PACKAGE, walk

Call = tuple[str, str]  # file and qualified name
STEP, REPORT = ("engine/engine.py", "Engine.step"), ("engine/async_engine.py", "AsyncEngine._report")
HELD = "reject_unsupported_content"  # a check of ChatCompletionRequest, which pydantic builds without Python code
# At this temperature a rule verifies the draft; every step drafts, whatever it costs on this machine.
BODY = {"messages": [{"role": "user", "content": "abc abc"}], "max_tokens": 24, "temperature": 1, "stream": True}
SPECULATION = SpeculationConfig(drafter="exit:1", num_speculative_tokens=2)


class Trace:
    """The calls of the package's functions in all threads that start while it is installed, while `is_on`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            self.calls.append((code.co_filename.removeprefix(f"{PACKAGE}/"), code.co_qualname))

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # typeshed knows no reset


@pytest.fixture(scope="module")
def calls(folder: Path) -> list[Call]:
    """Trace one request."""
    trace = Trace()

    async def scenario(service: Service, client: httpx.AsyncClient) -> None:
        trace.is_on = True
        answer = await client.post("/v1/chat/completions", json=BODY)
        trace.is_on = False
        assert answer.text.rstrip().endswith("[DONE]")

    with pytest.MonkeyPatch.context() as patch, trace.installed():
        patch.setattr(Assembly, "while_idle", lambda self: False)  # costs are measured by steps of their own
        run_app(build_engine(EngineConfig(model=str(folder)), SPECULATION), scenario)
    return trace.calls


def is_call(call: Call, listed: Call) -> bool:
    if listed[1] == "ChatCompletionRequest":
        return call[0] == listed[0] and call[1].endswith(HELD)
    return call == listed


def missing(listed: list[Call], calls: list[Call]) -> list[Call]:
    """Return the calls that are not made in the order of the list, from the first such one on."""
    left = list(listed)
    for call in calls:
        if left and is_call(call, left[0]):
            del left[0]
    return left


@pytest.mark.skipif(library() is None, reason="no native library is here")
def test_a_request_makes_the_calls_of_the_page_in_their_order(calls: list[Call]) -> None:
    listed = walk()
    to_step, to_report = listed.index(STEP), listed.index(REPORT)
    starts = [at for at, call in enumerate(calls) if call == STEP]
    steps = [calls[start:end] for start, end in zip(starts, [*starts[1:], len(calls)], strict=True)]
    assert not missing(listed[:to_step], calls[: starts[0]])
    assert any(not missing(listed[to_step : to_report + 1], step) for step in steps), "within one step"
    assert not missing(listed[to_report:], calls[starts[0] :])


def test_the_page_says_how_many_files_a_request_enters(calls: list[Call]) -> None:
    assert 70 <= len({file for file, _ in calls}) <= 90, "the page says about 80"


def test_a_walk_in_another_order_is_noticed() -> None:
    assert missing(HOPS[1:], HOPS) == [] and missing(HOPS[1:3], HOPS[2:0:-1]) == [HOPS[2]]
