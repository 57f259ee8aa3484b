"""Which drafter serves which head, and what it keeps in the target's pages."""

from __future__ import annotations

from typing import Any

from foretell.kv.cache import LayerShape
from foretell.models.heads import BlockHead, DistilledHead, EagleHead, Head, HeadConfig, MedusaConfig, MtpHead
from foretell.models.heads.config import BlockConfig, DistilledConfig, EagleConfig, MtpConfig
from foretell.runner.runner import ModelRunner

from .block import BlockDrafter
from .distilled import DistilledDrafter
from .drawing import DraftTemperature
from .eagle import EagleDrafter
from .heads import HeadDrafter
from .heads_pages import HeadPages, layers_beside
from .medusa import MedusaDrafter

SPARE = 128  # slots


def beside(config: HeadConfig) -> tuple[LayerShape, ...]:
    """The layers of the target's cache that a head of this config needs."""
    spare = SPARE if isinstance(config, BlockConfig) else 0  # a block's own keys and values are dropped after its pass
    return layers_beside(config, *_kept(config), spare)


def _kept(config: HeadConfig) -> tuple[int, bool]:
    """Layers whose keys and values a head keeps, and whether it keeps the feature of each place."""
    if isinstance(config, BlockConfig | DistilledConfig):
        return config.layers, False
    if isinstance(config, EagleConfig | MtpConfig):
        return config.layers, True
    assert isinstance(config, MedusaConfig), "there are no other heads"
    return 0, True


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
    pages = HeadPages(runner.cache, first, *_kept(head.config))
    kind: type[HeadDrafter] = MedusaDrafter
    if isinstance(head, BlockHead):
        kind = BlockDrafter
    elif isinstance(head, EagleHead | MtpHead):
        kind = EagleDrafter
    elif isinstance(head, DistilledHead):
        kind = DistilledDrafter
    return kind(runner, head, pages, name, draft_temperature, min_confidence, whole)
