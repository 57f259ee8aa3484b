"""Which copy a call is sent to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b

from .arrivals import Call
from .replica import Replica

Route = Callable[[Call, Sequence[Replica]], Replica]
ROUTES = ("random", "least-loaded", "prefix")
CROWDED = 1.25  # a copy with so many times the mean load is passed over for its prefixes, too
SLACK = 2  # texts that are no crowd


def route_of(name: str, seed: int) -> Route:
    """The way of that name."""
    if name == "random":
        rng = random.Random(f"{seed} routes")
        return lambda call, replicas: rng.choice(replicas)
    return by_prefix if name == "prefix" else least_loaded


def least_loaded(call: Call, replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.load, replica.number))


def by_prefix(call: Call, replicas: Sequence[Replica]) -> Replica:
    """Where its beginning is likely cached, unless everybody else thought so too."""
    if call.prefix is None:
        return least_loaded(call, replicas)
    digest = blake2b(str(call.prefix).encode(), digest_size=8).digest()
    home = replicas[int.from_bytes(digest, "big") % len(replicas)]
    mean = sum(replica.load for replica in replicas) / len(replicas)
    return home if home.load <= CROWDED * mean + SLACK else least_loaded(call, replicas)
