"""What all replicas say together of how they are and what they serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .replicas import OK, UNAVAILABLE, Answers

UNHEALTHY = {"status": "unavailable"}


def standing(found: Answers) -> tuple[int, dict[str, Any]]:
    """Return status 200 as long as one replica has it: the others are being replaced."""
    each = {name: _health(status, body) for name, (status, body) in sorted(found.items())}
    if any(status == OK for status, _ in found.values()):
        return OK, {"status": "ok", "reason": None, "replicas": each}
    reasons = sorted({str(health["reason"]) for health in each.values()})
    reason = "; ".join(reasons) if reasons else "no replica runs"
    return UNAVAILABLE, UNHEALTHY | {"reason": reason, "replicas": each}


def _health(status: int, body: bytes) -> dict[str, Any]:
    """Return a replica's report of its health, whatever its answer looks like."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    report = found if isinstance(found, dict) else {}
    default = {"status": "ok", "reason": None} if status == OK else UNHEALTHY | {"reason": f"answered {status}"}
    return default | report


def server_info(told: Mapping[str, bytes]) -> dict[str, Any]:
    """The first one's, with the states of all of them, each by its replica's name."""
    each = {name: json.loads(body) for name, body in sorted(told.items())}
    first = next(iter(each.values()))
    states = [{"replica": name, **state} for name, said in each.items() for state in said["internal_states"]]
    return {**first, "replicas": list(each), "internal_states": states}
