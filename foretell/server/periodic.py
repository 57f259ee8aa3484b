"""What a server does beside answering, again and again: one failure is told, and does not end it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

LOG = logging.getLogger("foretell")


async def repeat(name: str, every: float, do: Callable[[], Awaitable[None]]) -> None:
    """Until it is cancelled. A failure that comes again is told once."""
    told = ""
    while True:
        await asyncio.sleep(every)
        try:
            await do()
        except Exception as error:
            if told != repr(error):
                LOG.exception("%s failed; it is tried again", name)
            told = repr(error)
        else:
            told = ""
