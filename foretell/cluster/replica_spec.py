"""What every replica serves, as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.config import EngineConfig, SpeculationConfig
from foretell.server.config import ServerConfig


@dataclass(frozen=True)
class ReplicaSpec:
    """A server's settings; frozen, so that they can be sent to where a replica starts."""

    server: ServerConfig
    engine: EngineConfig
    speculation: SpeculationConfig

    @property
    def names(self) -> tuple[str, ...]:
        return self.server.served_model_name or (self.engine.model,)

    @property
    def most_texts(self) -> int:
        """That one replica writes or lets wait."""
        return self.engine.max_num_seqs + self.server.max_queue

    def gpus(self, any_there: bool) -> int:
        """Of one copy: one for each rank, and up to the one that the draft model has for itself."""
        device, beside = self.engine.device, (self.speculation.draft_device or "").partition(":")
        on_gpus = device.startswith("cuda") or (device == "auto" and any_there)
        last = int(beside[2]) + 1 if beside[2].isdigit() else 1
        return max(self.engine.tensor_parallel_size if on_gpus else 0, last if beside[0] == "cuda" else 0)

    def with_threads(self, threads: int) -> ReplicaSpec:
        """With the threads of a replica, where none were asked for."""
        if self.engine.threads is not None:
            return self
        return replace(self, engine=replace(self.engine, threads=threads))
