"""Looks at a folder for a better head, while others are served."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from foretell.engine.async_engine import AsyncEngine

from .periodic import repeat

LOG = logging.getLogger("foretell")
EVERY = 2.0  # seconds


class DraftReloader:
    """Reads beside the event loop, judges in the engine's thread."""

    def __init__(self, folder: str, engine: AsyncEngine, every: float = EVERY) -> None:
        from foretell.build.head_hot_swap import (
            HeadHotSwap,  # brings torch, for which a server that only starts does not wait
        )

        self.replacement, self.engine, self.every = HeadHotSwap(Path(folder), engine.engine), engine, every

    async def run(self) -> None:
        """Until it is cancelled."""
        await repeat("the look for a better head", self.every, self.look)

    async def look(self) -> None:
        """Once: take what is new, if it is better."""
        from foretell.build.head_hot_swap import load_or_report

        found = await asyncio.to_thread(load_or_report, self.replacement)
        if isinstance(found, str):
            LOG.warning("%s", found)
        elif found is not None:
            done = await self.engine.between_steps(lambda: self.replacement.replace_if_better(found))
            if done:
                LOG.info("%s", done)
