"""Decision log: why each drafter was used or skipped, for metrics, the log and `foretell explain`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection

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

Decision = tuple[str, str, str]  # drafter, DRAFTED or SKIPPED, reason


class DecisionLog:
    """Counts decisions per sequence, step and drafter, and logs when speculation goes off or on."""

    def __init__(self) -> None:
        self.on = True
        self.reason = ""  # of the last switch
        self.num_switches = 0
        self._draft_share = 1.0  # moving average of the share of steps with drafts
        self._counts: Counter[Decision] = Counter()
        self._unpolled: Counter[tuple[str, ...]] = Counter()  # by the drafters of the sequence

    @property
    def counts(self) -> dict[Decision, int]:
        """Return a copy of the counts, safe to read from any thread."""
        found = Counter(dict(self._counts))
        for drafters, count in dict(self._unpolled).items():
            found.update(dict.fromkeys(((drafter, SKIPPED, NOT_POLLED) for drafter in drafters), count))
        return dict(found)

    def record(self, drafter: str, decision: str, reason: str) -> None:
        """Count the decision on one drafter for one sequence in this step."""
        self._counts[drafter, decision, reason] += 1

    def record_sequence(
        self,
        drafters: tuple[str, ...],
        with_draft: Collection[str],
        unpolled: Collection[str],
        chosen: str,
        reason: str,
    ) -> str:
        """Count the decisions on all drafters of a sequence and return why none drafts, or "".

        `with_draft` are those that had or could make a draft, `unpolled` those that were not asked, `chosen` the one
        that drafts because of `reason`, or "".
        """
        lost = reason if reason in (LATE, NO_COSTS) else LOW_ACCEPT
        without = NO_COSTS if reason == NO_COSTS else NO_DRAFT
        counts, others = self._counts, OUTDONE if chosen else lost
        for drafter in drafters:
            if drafter == chosen:
                counts[drafter, DRAFTED, reason] += 1
            elif drafter in unpolled:
                counts[drafter, SKIPPED, NOT_POLLED] += 1
            else:
                counts[drafter, SKIPPED, others if drafter in with_draft else without] += 1
        if chosen:
            return ""
        return lost if with_draft else without

    def record_unpolled(self, sequences: list[tuple[str, ...]]) -> None:
        """Count sequences, given by their drafters, that were not polled in this step."""
        for drafters in sequences:
            self._unpolled[drafters] += 1

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
        polled, without = 0, 0
        for (drafter, _, reason), count in self._counts.items():
            if drafter in drafters and reason != NO_COSTS:
                polled += count
                without += count * (reason == NO_DRAFT)
        return 2 * without > polled

    def explain(
        self, rates: dict[str, tuple[float, float]], batch: int, min_draft_tokens: int, is_sampled: bool
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
