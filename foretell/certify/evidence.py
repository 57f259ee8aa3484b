"""Evidence of a certificate: draft tokens per setting, and whether they are enough to call a rule lossless."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

# Accepted and rejected draft tokens over all settings of a part. A bug that changes the output after every fourth
# accepted (or rejected) token is missed by ten of them in 0.75^10 = 6% of runs.
MIN_TOKENS = 10
SIGNIFICANCE = 0.01  # of the test that more near-ties differ with speculation than without


@dataclass(frozen=True)
class Evidence:
    """Draft tokens of one setting; all that were not accepted count as rejected."""

    setting: str
    drafted: int
    accepted: int

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


def missing_evidence(part: str, found: Iterable[Evidence]) -> list[str]:
    """Return why a part's settings prove nothing, one line each; empty with enough evidence.

    Acceptance is not tested without an accepted token, rollback is not tested without a rejected one: each setting
    needs both, and all settings together need `MIN_TOKENS` of both.
    """
    settings = list(found)
    reasons = [line for each in settings if (line := _missing(part, each))]
    accepted, rejected = sum(each.accepted for each in settings), sum(each.rejected for each in settings)
    if not reasons and settings and min(accepted, rejected) < MIN_TOKENS:
        counts = f"{accepted} accepted and {rejected} rejected draft tokens"
        reasons = [f"{part}: {counts}; each must be {MIN_TOKENS} or more, so give more prompts or tokens"]
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


def max_near_ties(sequences: int, control: int) -> int:
    """Return how many of `sequences` may differ at a near-tie if `control` of as many do without speculation.

    Floating-point rounding flips near-ties whenever the batch changes, with drafts or without. By Fisher's exact test,
    a count is too high if it exceeds the control's that far with a probability below `SIGNIFICANCE`.
    """
    return max(count for count in range(sequences + 1) if _tail(sequences, control, count) >= SIGNIFICANCE)


def _tail(sequences: int, control: int, count: int) -> float:
    """Return the probability that at least `count` of `count + control` differing sequences are in one half."""
    total = control + count
    ways = sum(
        math.comb(sequences, k) * math.comb(sequences, total - k) for k in range(count, min(sequences, total) + 1)
    )
    return ways / math.comb(2 * sequences, total)


def json_fields(result: Any, **names: str) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON; `names` maps field names to their names in the JSON."""
    return {names.get(name, name): value for name, value in asdict(result).items()}
