"""Whether `foretell bench load` fails where adapting costs more than it may."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from foretell.bench.load import LoadCell, LoadResult
from foretell.cli import bench_load
from foretell.cli.main import main

Interval = tuple[float, float]


def cell(load: str, variant: str, interval: Interval | None) -> LoadCell:
    known: dict[str, Any] = {field.name: None for field in fields(LoadCell)}  # the bar looks at two of them
    known |= {"errors": 0, "speedup": None if interval is None else sum(interval) / 2, "speedup_interval": interval}
    return LoadCell(**known | {"load": load, "variant": variant})


def findings(auto: Interval | None, on: Interval | None, off: Interval | None = (1.0, 1.0)) -> LoadResult:
    variants = {"off": off, "auto": auto, "on": on}
    cells = [cell("4 at once", variant, interval) for variant, interval in variants.items()]
    return LoadResult({}, (*cells, cell("16 at once", "off", (1.0, 1.0)), cell("16 at once", "auto", (0.9, 1.0))))


@pytest.mark.parametrize(
    ("found", "slow"),
    [
        (findings((0.90, 0.95), (0.5, 0.6)), True),
        (findings((1.20, 1.30), (1.5, 1.6)), True),
        (findings((0.90, 0.98), (0.5, 0.6)), False),
        (findings((1.20, 1.55), (1.5, 1.6)), False),
        (findings((0.90, 0.95), (1.5, 1.6), None), True),
        (findings(None, (1.5, 1.6)), False),
        (findings((0.90, 0.95), None, None), False),
    ],
)
def test_the_bar_is_held_to_beyond_noise(
    found: LoadResult, slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_load, "report", lambda *_: None)
    monkeypatch.setattr("foretell.bench.load.check_servers", lambda *_: None)
    monkeypatch.setattr("foretell.bench.load.run_load", lambda *_: found)
    assert bench_load.slower(found) == (["4 at once"] if slow else [])
    assert main(["bench", "load", "--base-url", "http://localhost:1"]) == int(slow)
    assert ("SLOWER, 4 at once" in capsys.readouterr().err) == slow
