"""How many draft tokens a setting rests on, and whether they are enough to call it lossless."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Accepted and rejected draft tokens over all settings of a part. A bug that changes the text after every fourth
# accepted (or rejected) token is missed by ten of them in 0.75^10 = 6% of runs.
ENOUGH = 10
# A near-tie count is excused unless plain decoding in a batch gives one this high with a smaller probability.
RARE = 0.01


@dataclass(frozen=True)
class Evidence:
    """Draft tokens of one setting. Rejected are all that were not accepted."""

    setting: str
    drafted: int
    accepted: int

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


def lacking(part: str, found: Iterable[Evidence]) -> list[str]:
    """Return what keeps a part's settings from showing anything, one line each.

    Acceptance is not tested without an accepted token, rollback is not tested without a rejected one: each setting
    needs both, and all settings together need `ENOUGH` of both.
    """
    settings = list(found)
    reasons = [line for each in settings if (line := _missing(part, each))]
    accepted, rejected = sum(each.accepted for each in settings), sum(each.rejected for each in settings)
    if not reasons and settings and min(accepted, rejected) < ENOUGH:
        counts = f"{accepted} accepted and {rejected} rejected draft tokens"
        reasons = [f"{part}: {counts}; each must be {ENOUGH} or more, so give more prompts or tokens"]
    return reasons


def _missing(part: str, each: Evidence) -> str:
    where = f"{part}, {each.setting}"
    if not each.drafted:
        return f"{where}: no token was drafted; name a drafter that drafts for these prompts"
    if not each.accepted:
        return f"{where}: none of {each.drafted} draft tokens was accepted; try other prompts or another drafter"
    if not each.rejected:
        return f"{where}: none of {each.drafted} draft tokens was rejected; try other prompts or more tokens"
    return ""


def most_near_ties(sequences: int, control: int) -> int:
    """Return how many of `sequences` may differ at a near-tie, where `control` of as many do without speculation.

    Rounding turns near-ties round whenever the batch changes, with drafts or without. By Fisher's exact test, a count
    is too high where it would be this far above the control's with a probability below `RARE`.
    """
    return max(count for count in range(sequences + 1) if _tail(sequences, control, count) >= RARE)


def _tail(sequences: int, control: int, count: int) -> float:
    """Return the probability that at least `count` of `count + control` differing sequences are in one half."""
    total = control + count
    ways = sum(
        math.comb(sequences, k) * math.comb(sequences, total - k) for k in range(count, min(sequences, total) + 1)
    )
    return ways / math.comb(2 * sequences, total)
