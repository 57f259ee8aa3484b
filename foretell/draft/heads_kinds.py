"""Which drafter serves which head."""

from __future__ import annotations

from typing import Any

from foretell.models.heads import BlockHead, DistilledHead, EagleHead, Head, MtpHead
from foretell.runner.head_pages import HeadPages
from foretell.runner.runner import ModelRunner

from .block import BlockDrafter
from .distilled import DistilledDrafter
from .drawing import DraftTemperature
from .eagle import EagleDrafter
from .heads import HeadDrafter
from .medusa import MedusaDrafter


def head_drafter(
    runner: ModelRunner,
    head: Head[Any],
    first: int,
    name: str,
    draft_temperature: DraftTemperature = "fixed",
    min_confidence: float = 0.0,
    whole: bool | None = None,
) -> HeadDrafter:
    """The drafter of a head whose layers stand in the target's cache from `first` on; `whole`: see `HeadDrafter`."""
    pages = HeadPages.of(head, runner.cache, first)
    kind: type[HeadDrafter] = MedusaDrafter
    if isinstance(head, BlockHead):
        kind = BlockDrafter
    elif isinstance(head, EagleHead | MtpHead):
        kind = EagleDrafter
    elif isinstance(head, DistilledHead):
        kind = DistilledDrafter
    return kind(runner, head, pages, name, draft_temperature, min_confidence, whole)
