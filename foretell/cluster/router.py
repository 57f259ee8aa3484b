"""The request router for Ray Serve, with the prefix-aware ranking of `prefix_affinity.py`."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .prefix_affinity import PrefixAffinity
from .replicas import ReplicaCall, RunningReplicas


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ranks the replicas for each call and counts the ongoing requests of each."""

    def initialize_state(self, routing: str = "prefix", slack: int = 4) -> None:
        self.affinity = PrefixAffinity(routing, slack)
        self._ongoing: Counter[str] = Counter()
        self._lock = threading.Lock()  # completions are reported from Ray's threads

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        call = _call(pending_request)
        with self._lock:
            loads = {name: self._ongoing[name] for name in replicas}
            order = self.affinity.rank(call.prefix_hashes, loads, call.avoid)
        RunningReplicas.names = tuple(replicas)
        if call.target is not None and call.target in replicas:
            order = [call.target]
        return [[replicas[name]] for name in order]  # never empty: Ray Serve would retry without a pause

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        with self._lock:
            self._ongoing[replica_id.unique_id] += 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        with self._lock:
            self.affinity.remember(_call(pending_request).prefix_hashes, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        name = replica_id.unique_id
        with self._lock:
            if self._ongoing[name] > 0:  # Ray also reports requests that could not be sent
                self._ongoing[name] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = [replica.replica_id.unique_id for replica in replicas]
        RunningReplicas.names = tuple(names)
        with self._lock:
            self.affinity.keep_only(names)
            self._ongoing = Counter({name: count for name, count in self._ongoing.items() if name in names})


def _call(pending_request: PendingRequest | None) -> ReplicaCall:
    """Return the call of a pending request; a dummy for anything else, which goes to the least loaded replica."""
    args: tuple[Any, ...] = pending_request.args if pending_request is not None else ()
    return args[0] if args and isinstance(args[0], ReplicaCall) else ReplicaCall("GET", "/")
