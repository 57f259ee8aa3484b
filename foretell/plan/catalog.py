"""The one data file: devices and models by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def known() -> Mapping[str, Mapping[str, Any]]:
    """`gpus` and `models`, each by name."""
    text = (files("foretell.plan") / "known.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return found
