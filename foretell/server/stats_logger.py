"""A log line every few seconds under load: what is written, and what speculation does for it."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

from .metrics import Totals
from .periodic import repeat
from .service import Service

LOG = logging.getLogger("foretell")
LOW_ACCEPTANCE, ENOUGH_DRAFTED = 0.15, 200


class StatsLogger:
    """Compares the totals with those of the last line."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._last = Totals()

    async def run(self) -> None:
        """For as long as the server runs."""
        every = self.service.config.log_interval

        async def once() -> None:
            self.report(every)

        await repeat("the log line of what was written", every, once)

    def report(self, seconds: float) -> None:
        """One line about the last `seconds`, if anything was written."""
        values = self.values(seconds)
        if values is not None:
            LOG.info(_line(values), extra={"values": values})
            if values["drafted"] >= ENOUGH_DRAFTED and values["acceptance_rate"] < LOW_ACCEPTANCE:
                LOG.warning("few guesses stand; another --drafter, or none, may serve this text better")

    def values(self, seconds: float) -> dict[str, Any] | None:
        """The figures of the last `seconds`; None where nothing happened."""
        self.service.engine.deliver_pending()
        now, before = deepcopy(self.service.metrics.totals), self._last
        self._last = now
        if now.tokens == before.tokens and now.prompt_tokens == before.prompt_tokens:
            return None
        drafts, drafted = now.drafts - before.drafts, now.drafted - before.drafted
        accepted, prompt = now.accepted - before.accepted, now.prompt_tokens - before.prompt_tokens
        places = before.per_position + [0] * (len(now.per_position) - len(before.per_position))
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
            "per_position": [(a - b) / drafts for a, b in zip(now.per_position, places, strict=True)] if drafts else [],
            "speedup": self.service.metrics.speedup.value,
        }


def _line(values: dict[str, Any]) -> str:
    positions = ", ".join(f"{rate:.2f}" for rate in values["per_position"][:8])
    speedup = f"; speedup {values['speedup']:.2f}" if values["speedup"] is not None else ""
    return (
        f"{values['running']} running, {values['waiting']} waiting; "
        f"{values['tokens_per_second']:.1f} tokens/s written, {values['prompt_tokens_per_second']:.1f} read; "
        f"pages {values['page_use']:.0%}, prefix hits {values['prefix_hits']:.0%}; "
        f"accepted {values['accepted']} of {values['drafted']} guesses ({values['acceptance_rate']:.0%}), "
        f"mean acceptance length {values['mean_acceptance_length']:.2f}, by place {positions or '-'}{speedup}"
    )
