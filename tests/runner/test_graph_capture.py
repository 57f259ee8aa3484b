"""CUDA graph captures that run out of memory, on a fake device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.runner.cuda import graphs as recording
from foretell.runner.cuda.graphs import CAPTURE_BACKOFF, GraphCache, GraphCapture


class Still:
    """A fake stream and its context."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Graph:
    """A fake CUDA graph that knows whether a capture is running."""

    recording: Graph | None = None
    ends = 0
    given_up = False  # the device ends a capture in which something fails

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert Graph.recording is None, "one at a time"
        Graph.recording = self

    def capture_end(self) -> None:
        assert Graph.recording is self
        Graph.recording = None
        Graph.ends += 1
        if Graph.given_up:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> GraphCapture:
    pools = iter(range(100))
    for name, stand_in in {
        "Stream": Still,
        "stream": Still,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, next(pools)),
        "synchronize": lambda device: None,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Graph, "recording", None)
    monkeypatch.setattr(Graph, "given_up", False)
    return GraphCapture(torch.device("cuda"))


def hungry() -> None:
    raise torch.OutOfMemoryError("planted")


@pytest.mark.parametrize("given_up", [False, True])
def test_a_failed_capture_is_ended_and_tried_again_later(
    capture: GraphCapture, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *given: calls.append(given), raising=False)
    pool, Graph.given_up = capture._pool, given_up
    assert capture.capture(hungry) is None
    assert Graph.recording is None, "later work is not part of the capture"
    assert calls == ([(0, pool), (0, pool)] if given_up else [])
    assert (capture._pool == pool) != given_up
    Graph.given_up = False
    assert all(capture.capture(lambda: 5) is None for _ in range(CAPTURE_BACKOFF))
    found = capture.capture(lambda: 5)
    assert found is not None and found[1] == 5 and capture.failures == 1


def test_other_errors_are_raised_and_end_the_capture(capture: GraphCapture) -> None:
    def broken() -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape"):
        capture.capture(broken)
    assert Graph.recording is None


def test_work_that_cannot_be_captured_runs_eagerly(capture: GraphCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "CAPTURE_BACKOFF", 0)
    recorder: GraphCache[int, int] = GraphCache(torch.device("cuda"))
    runs: list[int] = []

    def work() -> int:
        runs.append(1)
        if Graph.recording is not None:
            raise torch.OutOfMemoryError("planted")
        return len(runs)

    assert [recorder(3, work) for _ in range(3)] == [1, 2, 4], (
        "the capture is tried each time after the first, and fails"
    )
    assert recorder.graphs == {3: None}
