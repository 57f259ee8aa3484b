"""Results as they were kept: from the JSON of a run back to what it found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.errors import RequestError

from .acceptance_by_depth import AcceptanceByDepth
from .latency import Latency
from .results import Cell, Result

OWN = ("bench", "complete", "prompts", "left_out", "same_text", "overall", "cells")
WAITS = ("token_seconds", "plain_token_seconds", "text_seconds", "plain_text_seconds")


def read(path: Path) -> Result:
    """The result of `bench offline` or `bench drafters` in a file that --out wrote."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError("run", f"there is no {path}; write one with foretell bench offline --out {path}") from None
    except ValueError as error:
        raise RequestError("run", f"{path} is not JSON: {error}") from None
    try:
        return result_of(value)
    except (KeyError, TypeError, AttributeError):
        raise RequestError("run", f"{path} is no run of bench offline or bench drafters of this version") from None


def result_of(value: Mapping[str, Any]) -> Result:
    """What `Result.as_json` gave."""
    return Result(
        value["bench"],
        {name: each for name, each in value.items() if name not in OWN},
        tuple(map(cell_of, value["cells"])),
        tuple(map(cell_of, value["overall"])),
        value["complete"],
        tuple(value["prompts"]),
        tuple(value["left_out"]),
    )


def cell_of(value: Mapping[str, Any]) -> Cell:
    """One row of it."""
    bounds = value["speedup_interval"]
    changed = {
        "speedup_interval": None if bounds is None else (bounds[0], bounds[1]),
        "differing": tuple(value["differing"]),
        "places": AcceptanceByDepth(*(tuple(value["places"][name]) for name in ("reached", "stood"))),
    }
    return Cell(**{**value, **changed, **{name: _latency(value[name]) for name in WAITS}})


def _latency(value: Mapping[str, Any] | None) -> Latency | None:
    return None if value is None else Latency(**{**value, "curve": tuple(value["curve"])})
