"""Dummy steps that compile kernels before the first request."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event

import pytest
import torch

from foretell.draft.heads.warmup import DummyHeads
from foretell.models.config import Rope
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import HeadConfig
from foretell.models.load import materialize, meta_model
from foretell.runner.cuda.graphs import _NO_CAPTURE, GraphCapture
from foretell.runner.cuda.warmup import (
    DRAFT_STEPS,
    DUMMY_WEIGHT,
    PLAIN_STEPS,
    TREE_STEPS,
    BackgroundWarmup,
    one_layer_per_kind,
    run_dummy_steps,
)
from foretell.runner.model_runner import ModelRunner
from tests.tiny import CONFIG, WITH_CACHE, tiny_decoder
from tests.waiting import TIMEOUT

TURNS, SLOW = Rope(), Rope(theta=5e5)


def blank() -> Decoder:
    return materialize(meta_model(one_layer_per_kind(CONFIG), torch.float32), torch.device("cpu"))


@pytest.mark.parametrize(
    ("ropes", "windows", "kinds"),
    [
        ((TURNS,) * 4, (None,) * 4, 1),
        ((TURNS,) * 4, (5, None, 5, None), 2),
        ((TURNS, SLOW, TURNS, SLOW), (5, None, None, None), 3),
    ],
)
def test_the_dummy_model_has_one_layer_of_each_kind(
    ropes: tuple[Rope, ...], windows: tuple[int | None, ...], kinds: int
) -> None:
    config = replace(CONFIG, layers=4, ropes=ropes, windows=windows)
    few = one_layer_per_kind(config)
    found = set(zip(few.ropes, few.windows, strict=True))
    assert found == set(zip(ropes, windows, strict=True)) and few.layers == len(few.ropes) == len(found) == kinds
    assert replace(few, layers=4, ropes=ropes, windows=windows) == config


def test_steps_that_do_not_fit_are_skipped() -> None:
    runner = ModelRunner(tiny_decoder(), 8, 16, 128, (0, 2))
    fitting = [step for step in PLAIN_STEPS + DRAFT_STEPS if step.length <= 128]
    assert run_dummy_steps(runner, PLAIN_STEPS + DRAFT_STEPS) == len(fitting) < len(PLAIN_STEPS + DRAFT_STEPS)
    assert run_dummy_steps(runner, PLAIN_STEPS, lambda: True) == 0
    assert runner.pool.num_held == 0


def few(context: int = 256) -> ModelRunner:
    return ModelRunner(blank(), context // 16, 16, context, (0, 1))


CPU = torch.device("cpu")


@pytest.mark.parametrize("drafts", [False, True])
def test_the_warm_up_is_complete_when_the_load_ends(drafts: bool) -> None:
    with BackgroundWarmup(lambda: few(4096), CPU, drafts) as warming:
        pass
    assert warming.steps == len(PLAIN_STEPS) + drafts * len(DRAFT_STEPS) and not warming.drafts


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_heads_warm_up_within_their_grace_period(config: HeadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = DummyHeads([config, config], trees=True)

    def make() -> ModelRunner:
        model = blank()
        for weight in model.parameters():
            weight.fill_(DUMMY_WEIGHT)
        heads.share_weights(model, 1024)
        return ModelRunner(model, 64, 16, 1024, (0, 1), heads.extra_layers)

    monkeypatch.setattr("foretell.runner.cuda.warmup.HEAD_GRACE", math.inf)
    with BackgroundWarmup(make, CPU, True, heads) as warming:
        pass
    assert warming.steps == len([step for step in PLAIN_STEPS + DRAFT_STEPS + TREE_STEPS if step.length <= 1024])
    assert warming.drafts == 2 * len(heads.drafts)
    monkeypatch.setattr("foretell.runner.cuda.warmup.HEAD_GRACE", -math.inf)
    with BackgroundWarmup(make, CPU, True, heads) as warming:
        pass
    assert warming.steps and not warming.drafts


def test_a_failed_load_stops_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = Event()

    def slow() -> ModelRunner:
        go_on.wait(TIMEOUT)
        return few()

    def wait() -> None:
        go_on.set()  # the load has failed by then
        join()

    with pytest.raises(KeyError), BackgroundWarmup(slow, CPU, True) as warming:
        join = warming._thread.join
        monkeypatch.setattr(warming._thread, "join", wait)
        raise KeyError
    assert warming.steps == 0


def test_a_failed_warm_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> ModelRunner:
        raise torch.OutOfMemoryError("planted")

    with caplog.at_level(logging.ERROR), BackgroundWarmup(fails, CPU, True) as warming:
        pass
    assert warming.steps == 0 and "kernel warm-up failed" in caplog.text


def test_the_warm_up_runs_on_the_requested_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts on the first device."""
    calls: list[object] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        calls.append(device)
        yield
        calls.append("left")

    def make() -> ModelRunner:
        calls.append("made")
        return few()

    monkeypatch.setattr(torch.cuda, "device", on)
    with BackgroundWarmup(make, torch.device("cuda:1"), False) as warming:
        pass
    assert warming.steps and calls == [torch.device("cuda:1"), "made", "left"]


def test_nothing_is_captured_during_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    capture, found = GraphCapture(CPU), []

    def make() -> ModelRunner:
        found.append(capture.capture(lambda: found.append("run")))
        return few()

    with BackgroundWarmup(make, CPU, False) as warming:
        pass
    assert warming.steps and found == [None] and not _NO_CAPTURE.get()
