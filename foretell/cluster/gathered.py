"""What all replicas say together of how they are and what they serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

OK = 200
UNAVAILABLE = 503


def standing(told: Mapping[str, tuple[int, bytes]]) -> tuple[int, dict[str, Any]]:
    """Well, as long as one replica is: the others are being replaced."""
    each = {name: json.loads(body) for name, (_, body) in sorted(told.items())}
    if any(status == OK for status, _ in told.values()):
        return OK, {"status": "ok", "reason": None, "replicas": each}
    reasons = sorted({str(said.get("reason")) for said in each.values()})
    reason = "; ".join(reasons) if reasons else "no replica runs"
    return UNAVAILABLE, {"status": "unavailable", "reason": reason, "replicas": each}


def server_info(told: Mapping[str, bytes]) -> dict[str, Any]:
    """The first one's, with the states of all of them, each by its replica's name."""
    each = {name: json.loads(body) for name, body in sorted(told.items())}
    first = next(iter(each.values()))
    states = [{"replica": name, **state} for name, said in each.items() for state in said["internal_states"]]
    return {**first, "replicas": list(each), "internal_states": states}
