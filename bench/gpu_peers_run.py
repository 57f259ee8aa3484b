"""Runs what `gpu_peers.py` measures: engines that load together and are measured one at a time."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from engine_child import Child, Lost
from gpu_peers_cells import Cell, Cells
from gpu_peers_report import OURS, VLLM, Report

HERE = Path(__file__).parent
A_JOB = 150.0  # seconds, the most
AGAIN = 30.0  # seconds left beyond loading, below which no second start is tried
WARM_UP = 16  # tokens


@dataclass(frozen=True)
class Peer:
    """How an engine is started, and the GiB it takes of the device."""

    name: str
    settings: dict[str, Any]
    gib: float

    @property
    def is_vllm(self) -> bool:
        return not self.name.startswith(OURS)

    @property
    def command(self) -> list[str]:
        script = "gpu_peer_vllm.py" if self.is_vllm else "gpu_peer_ours.py"
        return [sys.executable, str(HERE / script), json.dumps(self.settings)]

    @property
    def file(self) -> str:
        """Its name as one of files."""
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Limits:
    """Seconds for everything and for loading; how often each cell is measured."""

    seconds: float
    loading: float
    rounds: int


@dataclass(frozen=True)
class Folders:
    """Folders: vLLM's own, where it is not installed, logs, and what is compiled."""

    vllm: Path | None
    logs: Path
    caches: Path


class Run:
    """Running engines, the time left, and the report."""

    def __init__(self, cells: Cells, limits: Limits, folders: Folders, report: Report) -> None:
        self.cells, self.limits, self.folders, self.report = cells, limits, folders, report
        self.until = monotonic() + limits.seconds
        self.children: dict[str, Child] = {}
        self.loading = 0.0  # seconds until the last of them was ready

    @property
    def left(self) -> float:
        return self.until - monotonic()

    def all(self, peers: list[Peer], free: float) -> None:
        """As many at once as have room in `free` GiB, the first before others; then, with the time that is left, the
        rest and what was lost while loading. Ours and plain vLLM are compared within one wave or not at all."""
        first: list[Peer] = []
        for peer in peers:
            if sum(other.gib for other in first) + peer.gib <= free:
                first.append(peer)
        self.wave(first)
        started = {peer.name for peer in first if peer.name in self.report.loaded}
        later = [peer for peer in peers if peer.name not in started]
        if any(peer.name in (OURS, VLLM) for peer in later):
            later = [peer for peer in peers if peer in later or peer.name in (OURS, VLLM)]
        self.end()
        if later and self.left < self.loading + AGAIN:
            for peer in later:
                self.report.unreached(peer.name)
        elif later:
            self.wave(later)

    def alone(self, peers: list[Peer]) -> None:
        """Start each once more by itself, with nothing compiled and no other engine running."""
        for peer in peers:
            if self.left < self.loading:
                self.report.unreached(f"{peer.name}, started alone")
                continue
            self.start([replace(peer, name=f"{peer.name} alone")])
            self.end()

    def wave(self, peers: list[Peer]) -> None:
        """Start these together and measure them in turn."""
        self.start(peers)
        self.prepare()
        for _ in range(self.limits.rounds):
            for cell in self.cells.plain:
                for name in (OURS, VLLM):
                    self.measure(name, cell)
        for turn in range(self.limits.rounds):
            for cell, job in self.cells.ours:
                if self.report.rounds(OURS, job.way, cell) <= turn:
                    self.measure(OURS, (cell, job))
            for name in [peer.name for peer in peers if peer.name not in (OURS, VLLM)]:
                for cell in self.cells.speculative:
                    self.measure(name, cell)

    def start(self, peers: list[Peer]) -> None:
        """Start all engines. Those not ready in time are stopped, so that no engine computes during another's turn."""
        for peer in peers:
            log = self.folders.logs / f"{peer.file}.log"
            self.children[peer.name] = Child(peer.name, peer.command, self.environment(peer), log)
        until = monotonic() + min(self.limits.loading, self.left)
        for peer in peers:
            child = self.children[peer.name]
            try:
                child.wait_ready(until - monotonic())
            except Lost as why:
                self.lose(peer.name, f"while loading: {why}")
                continue
            self.report.ready(peer.name, child.ready, child.about, len(peers))
            self.loading = max(self.loading, child.ready)

    def environment(self, peer: Peer) -> dict[str, str]:
        """Return an environment without network and with a compile cache of its own."""
        caches = self.folders.caches / peer.file
        found = os.environ | {"HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": str(caches / "triton")}
        if not peer.is_vllm:
            return found
        paths = [str(self.folders.vllm)] if self.folders.vllm else []
        paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        return found | {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "FLASHINFER_WORKSPACE_BASE": str(caches),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled, by a compiler that may not be there
            "VLLM_NO_USAGE_STATS": "1",
            # Its processes are all here, and a name may lead nowhere.
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }

    def prepare(self) -> None:
        """Graphs, costs and first times, of one after the other."""
        for name in list(self.children):
            cells = self.cells.plain if name in (OURS, VLLM) else self.cells.speculative
            cells = cells + self.cells.ours if name == OURS else cells
            # The full length of many sequences, because CUDA graphs of longer ones are captured when they are reached.
            jobs = [job if job.batch > 1 else replace(job, tokens=min(job.tokens, WARM_UP)) for _, job in cells]
            try:
                self.children[name].prepare(jobs, min(A_JOB, self.left))
            except Lost as why:
                self.lose(name, f"while warming up: {why}")

    def measure(self, name: str, cell: Cell) -> None:
        """One job, if the engine is there and there is time."""
        words, job = cell
        if name not in self.children:
            return
        if self.left <= 0:
            self.report.unreached(f"{name}, {job.way}, {words}")
            return
        try:
            taken = self.children[name].measure(job, min(A_JOB, self.left))
        except Lost as why:
            self.lose(name, f"{job.way}, {words}: {why}")
            return
        self.report.add(name, job.way, words, taken)

    def lose(self, name: str, why: str) -> None:
        """Tell it; a job may fail and its engine be there for the next."""
        child = self.children[name]
        print(f"{name}: {why}; its log ends with\n{child.last_words()}", file=sys.stderr, flush=True)
        self.report.lost(name, why)
        if child.has_ended:
            self.children.pop(name).end()

    def end(self) -> None:
        for child in self.children.values():
            child.end()
        self.children.clear()
