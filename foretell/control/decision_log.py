"""Decision log: why each drafter was used or skipped, for metrics, the log and `foretell explain`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping

LOG = logging.getLogger("foretell")

# Values of metric labels. They are part of the interface and keep their spelling.
DRAFTED, SKIPPED = "drafted", "skipped"
# Reasons to draft.
PAYS = "pays"  # the expected speedup exceeds 1
PROBE = "trial"  # a probe of a drafter that is not in use
FIXED = "fixed"  # the draft length is fixed by an option
SLO = "hurry"  # the sequence is late on its SLO
# Reasons to skip.
NO_DRAFT = "no_guess"  # the drafter had no draft
LOW_ACCEPT = "low_accept"  # the draft would not have paid
OUTDONE = "outdone"  # another drafter was better
NOT_POLLED = "not_asked"  # the poll limiter skipped the sequence
NO_COSTS = "no_costs"  # the latency model has no step yet
LATE = "late"  # it would have paid, but the step was in flight before the sequence was polled

# Shares of steps with drafts below which speculation is reported off, and above which it is on again (hysteresis).
OFF_BELOW, ON_ABOVE = 0.05, 0.2

PRECEDENCE = (LATE, NO_COSTS, LOW_ACCEPT, NO_DRAFT, NOT_POLLED)  # of reasons, if the drafters of a sequence differ

Decision = tuple[str, str, str]  # drafter, DRAFTED or SKIPPED, reason
# Drafters of a sequence, those with a free draft, whether it was polled, the chosen one and the reason.
Record = tuple[tuple[str, ...], tuple[str, ...], bool, str, str]


class DecisionLog:
    """Counts decisions per sequence, step and drafter, and logs when speculation goes off or on."""

    def __init__(self, free: Collection[str] = ()) -> None:
        """`free` are the free drafters: they draft only where they are polled and find something."""
        self.free, self.on = free, True
        self.reason = ""  # of the last switch
        self.num_switches = 0
        self._draft_share = 1.0  # moving average of the share of steps with drafts
        self._records: Counter[Record] = Counter()
        self._skip_reasons: dict[Record, str] = {}

    def record(self, drafters: tuple[str, ...], drafts: Collection[str], polled: bool, chosen: str, reason: str) -> str:
        """Count the decision on a sequence and return why no drafter drafts, or "".

        `drafts` are the free drafters that had a draft, `chosen` the one that drafts because of `reason`, or "".
        """
        record = drafters, tuple(drafts), polled, chosen, reason
        self._records[record] += 1
        if chosen:
            return ""
        if record not in self._skip_reasons:
            reasons = [self._why(drafter, *record[1:]) for drafter in drafters]
            self._skip_reasons[record] = min(reasons, key=PRECEDENCE.index, default="")
        return self._skip_reasons[record]

    def _why(self, drafter: str, drafts: Collection[str], polled: bool, chosen: str, reason: str) -> str:
        """Return why a drafter of a sequence was skipped."""
        if drafter in self.free and not polled:
            return NOT_POLLED
        if drafter in self.free and drafter not in drafts:
            return NO_COSTS if reason == NO_COSTS else NO_DRAFT
        if chosen:
            return OUTDONE
        return reason if reason in (LATE, NO_COSTS) else LOW_ACCEPT

    @property
    def counts(self) -> dict[Decision, int]:
        """Return sequence steps by drafter, decision and reason; safe to read from any thread."""
        found: Counter[Decision] = Counter()
        for (drafters, drafts, polled, chosen, reason), count in dict(self._records).items():
            for drafter in drafters:
                is_chosen = drafter == chosen
                why = reason if is_chosen else self._why(drafter, drafts, polled, chosen, reason)
                found[drafter, DRAFTED if is_chosen else SKIPPED, why] += count
        return dict(found)

    def record_step(self, drafted: bool, explain: Callable[[], str]) -> None:
        """Count a step. `explain` is called for the reason if speculation goes off or on."""
        self._draft_share += 0.06 * (drafted - self._draft_share)
        on = self._draft_share > (OFF_BELOW if self.on else ON_ABOVE)
        if on != self.on:
            self.on = on
            self.reason = explain()
            self.num_switches += 1
            LOG.info("speculation is %s: %s", "on" if on else "off", self.reason)

    def rarely_drafts(self, drafters: Collection[str]) -> bool:
        """Return whether these drafters had no draft in most of their polls."""
        found = {
            key: count
            for key, count in self.counts.items()
            if key[0] in drafters and key[2] not in (NO_COSTS, NOT_POLLED)
        }
        return 2 * sum(count for key, count in found.items() if key[2] == NO_DRAFT) > sum(found.values())

    def explain(
        self, rates: Mapping[str, tuple[float, float]], batch: int, min_draft_tokens: int, is_sampled: bool
    ) -> str:
        """Return the log message of a switch. `rates` has acceptance and break-even acceptance by drafter."""
        compared = [
            f"{drafter} acceptance {have:.2f} {'>=' if have >= need else '<'} break-even {need:.2f}"
            for drafter, (have, need) in rates.items()
        ]
        message = f"{', '.join(compared)} at batch {batch}"
        if self.on:
            return message
        if any(have >= need for have, need in rates.values()):
            is_rare = self.rarely_drafts(rates)
            cause = "drafts are rare" if is_rare else "polling drafters takes longer than their drafts save"
            return f"{message}, but {cause}; try a drafter that drafts more often"
        remedies = {
            "a more accurate drafter": True,
            "shorter drafts": min_draft_tokens > 1,
            "a smaller batch": batch > 1,
            "a lower temperature": is_sampled,
        }
        return f"{message}; try {', '.join(name for name, applies in remedies.items() if applies)}"
