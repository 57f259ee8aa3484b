"""What is to be trained, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .settings import TrainConfig
from .trainer import Shown


@dataclass(frozen=True)
class TrainJob:
    """What is to be trained, for which target, from what, into which folder."""

    kind: str
    target: str
    data: str | None
    out: Path
    resume: bool = False
    dry_run: bool = False  # to say what it will take, and no more
    config: TrainConfig = TrainConfig()


@dataclass(frozen=True)
class Reporter:
    """Who is told what, while it goes on."""

    say: Callable[[str], None]
    answered: Callable[[int, int], None]
    shown: Callable[[Shown], None]
