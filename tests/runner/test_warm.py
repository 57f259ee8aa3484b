"""Steps of nothing, by which kernels are compiled before the first request."""

from __future__ import annotations

import logging
from dataclasses import replace
from threading import Event, Timer

import pytest
import torch

from foretell.models.config import Rope
from foretell.models.decoder import Decoder
from foretell.models.load import sketch, take_memory
from foretell.runner.cuda_warm import GUESSED, PLAIN, Warming, few_layers, rehearse
from foretell.runner.runner import ModelRunner
from tests.tiny import CONFIG, tiny_decoder

TURNS, SLOW = Rope(), Rope(theta=5e5)


def blank() -> Decoder:
    return take_memory(sketch(few_layers(CONFIG), torch.float32), torch.device("cpu"))


@pytest.mark.parametrize(
    ("ropes", "windows", "kinds"),
    [
        ((TURNS,) * 4, (None,) * 4, 1),
        ((TURNS,) * 4, (5, None, 5, None), 2),
        ((TURNS, SLOW, TURNS, SLOW), (5, None, None, None), 3),
    ],
)
def test_each_kind_of_layer_is_there_once(ropes: tuple[Rope, ...], windows: tuple[int | None, ...], kinds: int) -> None:
    config = replace(CONFIG, layers=4, ropes=ropes, windows=windows)
    few = few_layers(config)
    found = set(zip(few.ropes, few.windows, strict=True))
    assert found == set(zip(ropes, windows, strict=True)) and few.layers == len(few.ropes) == len(found) == kinds
    assert replace(few, layers=4, ropes=ropes, windows=windows) == config


def test_steps_that_fit_are_run_and_others_left_out() -> None:
    runner = ModelRunner(tiny_decoder(), 8, 16, 128, (0, 2))
    fitting = [step for step in PLAIN + GUESSED if step.length <= 128]
    assert rehearse(runner, PLAIN + GUESSED) == len(fitting) < len(PLAIN + GUESSED)
    assert rehearse(runner, PLAIN, lambda: True) == 0
    assert runner.pool.held == 0


@pytest.mark.parametrize("guesses", [False, True])
def test_it_is_done_when_the_load_is_over(guesses: bool) -> None:
    with Warming(blank, 4096, 16, guesses, taps=True) as warming:
        pass
    assert warming.steps == len(PLAIN) + guesses * len(GUESSED)


def test_a_failed_load_does_not_wait_for_all_of_it() -> None:
    go_on = Event()

    def slow() -> Decoder:
        go_on.wait(10)
        return blank()

    with pytest.raises(KeyError), Warming(slow, 256, 16, True, taps=False) as warming:
        Timer(0.1, go_on.set).start()  # the load has failed by then
        raise KeyError
    assert warming.steps == 0


def test_what_fails_is_left_to_the_first_requests(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Decoder:
        raise torch.OutOfMemoryError("planted")

    with caplog.at_level(logging.ERROR), Warming(fails, 256, 16, True, taps=False) as warming:
        pass
    assert warming.steps == 0 and "the first requests wait" in caplog.text
