"""Periodic background tasks of the server: the statistics log line, and reloading of the draft head."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.engine.async_engine import AsyncEngine
from foretell.server.metrics import Totals

if TYPE_CHECKING:
    from foretell.server.service import Service

LOG = logging.getLogger("foretell")
RELOAD_INTERVAL = 2.0  # seconds between two checks of the watched folder
LOW_ACCEPTANCE = 0.15  # acceptance rate below which a warning is logged,
MIN_DRAFTED = 200  # if at least this many draft tokens were verified


async def repeat(name: str, interval: float, task: Callable[[], Awaitable[None]]) -> None:
    """Run a task every `interval` seconds until cancelled. A failure that repeats is logged once."""
    logged = ""
    while True:
        await asyncio.sleep(interval)
        try:
            await task()
        except Exception as error:
            if logged != repr(error):
                LOG.exception("%s failed; it will be retried", name)
            logged = repr(error)
        else:
            logged = ""


class DraftReloader:
    """Watches a folder for a new draft head. It is loaded in a thread and evaluated in the engine's thread."""

    def __init__(self, folder: str, engine: AsyncEngine, interval: float = RELOAD_INTERVAL) -> None:
        from foretell.build.head_hot_swap import HeadHotSwap  # imports torch, which the start-up does not wait for

        self.hot_swap, self.engine, self.interval = HeadHotSwap(Path(folder), engine.engine), engine, interval

    async def run(self) -> None:
        """Poll the folder until cancelled."""
        await repeat("reloading the draft head", self.interval, self.poll)

    async def poll(self) -> None:
        """Check the folder once; swap a new head in if it is accepted more often."""
        from foretell.build.head_hot_swap import load_or_report

        head = await asyncio.to_thread(load_or_report, self.hot_swap)
        if isinstance(head, str):
            LOG.warning("%s", head)
        elif head is not None:
            message = await self.engine.between_steps(lambda: self.hot_swap.replace_if_better(head))
            if message:
                LOG.info("%s", message)


class StatsLogger:
    """Logs throughput and speculation statistics since the last line."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._last = Totals()

    async def run(self) -> None:
        """Log a line every `log_interval` seconds until cancelled."""
        interval = self.service.config.log_interval

        async def log_once() -> None:
            self.report(interval)

        await repeat("logging statistics", interval, log_once)

    def report(self, seconds: float) -> None:
        """Log one line about the last `seconds`, if there were any tokens."""
        values = self.values(seconds)
        if values is not None:
            LOG.info(_line(values), extra={"values": values})
            if values["drafted"] >= MIN_DRAFTED and values["acceptance_rate"] < LOW_ACCEPTANCE:
                LOG.warning("low acceptance rate; another --drafter, or none, may suit this workload better")

    def values(self, seconds: float) -> dict[str, Any] | None:
        """Return the statistics of the last `seconds`; None if there were no tokens."""
        self.service.engine.deliver_pending()
        now, before = deepcopy(self.service.metrics.totals), self._last
        self._last = now
        if now.tokens == before.tokens and now.prompt_tokens == before.prompt_tokens:
            return None
        drafts, drafted = now.drafts - before.drafts, now.drafted - before.drafted
        accepted, prompt = now.accepted - before.accepted, now.prompt_tokens - before.prompt_tokens
        padded_before = before.per_position + [0] * (len(now.per_position) - len(before.per_position))
        positions = zip(now.per_position, padded_before, strict=True)
        load = self.service.engine.load
        return {
            "running": load.running,
            "waiting": load.waiting,
            "tokens_per_second": (now.tokens - before.tokens) / seconds,
            "prompt_tokens_per_second": prompt / seconds,
            "page_use": load.pages_held / load.pages if load.pages else 0.0,
            "prefix_hits": (now.cached_tokens - before.cached_tokens) / prompt if prompt else 0.0,
            "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "drafted": drafted,
            "accepted": accepted,
            "per_position": [(a - b) / drafts for a, b in positions] if drafts else [],
            "speedup": self.service.metrics.speedup.value,
        }


def _line(values: dict[str, Any]) -> str:
    positions = ", ".join(f"{rate:.2f}" for rate in values["per_position"][:8])
    speedup = f"; speedup {values['speedup']:.2f}" if values["speedup"] is not None else ""
    return (
        f"{values['running']} running, {values['waiting']} waiting; "
        f"{values['tokens_per_second']:.1f} output tokens/s, {values['prompt_tokens_per_second']:.1f} prompt tokens/s; "
        f"KV cache usage {values['page_use']:.0%}, prefix cache hit rate {values['prefix_hits']:.0%}; "
        f"accepted {values['accepted']} of {values['drafted']} draft tokens ({values['acceptance_rate']:.0%}), "
        f"mean acceptance length {values['mean_acceptance_length']:.2f}, by position {positions or '-'}{speedup}"
    )
