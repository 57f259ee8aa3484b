"""A process that may allocate little more than it has: requests may fail, the process survives, and recovers."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretell.kernels.native.library import library
from tests.server.process import ServerProcess
from tests.waiting import TIMEOUT

from .limited_memory import REQUESTS

MB = 1 << 20
RUST_ABORT = "memory allocation of"  # Rust libraries such as the tokenizer cannot raise MemoryError: they abort
needs_limits = pytest.mark.skipif(
    library() is None or not Path("/proc/self/status").exists(),
    reason="no C++ compiler, or not Linux",
)


def play(spare: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.attack.limited_memory", str(spare)],
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@needs_limits
def test_an_engine_without_memory_runs_smaller_steps_and_recovers() -> None:
    """The head and the step lack memory for a full batch of prompts; no request gets other tokens."""
    found = play(8 * MB)
    assert found["failure"] is None and found["steps_shed"] > 0
    assert found["after"] == found["alone"], "all is as before once there is memory"
    pairs = zip(found["limited"], found["alone"], strict=True)
    assert all(isinstance(limited, str) or limited == alone for limited, alone in pairs)
    assert sum(limited == alone for limited, alone in zip(found["limited"], found["alone"], strict=True)) > REQUESTS / 2


@pytest.mark.slow
@pytest.mark.weights
@needs_limits
@pytest.mark.parametrize("spare", [6, 60])
def test_a_server_without_memory_survives(spare: int) -> None:
    """The default model with the default drafters; what fails is answered, and later requests succeed."""
    with ServerProcess(None, "--kv-memory", "0.2", "--max-model-len", "1024") as server:

        def ask(number: int) -> int | str:
            prompt = f"{number} times: " + "the cat sat on the mat " * 60
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.7 * (number % 2), "seed": number}
            try:
                return httpx.post(f"{server.url}/v1/completions", json=body, timeout=4 * TIMEOUT).status_code
            except httpx.TransportError as error:
                return type(error).__name__

        def limit(bytes_: int) -> None:
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (bytes_, resource.RLIM_INFINITY))

        assert ask(0) == 200
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        (mapped,) = re.findall(r"VmSize:\s+(\d+)", status)
        limit(int(mapped) * 1024 + spare * MB)
        with ThreadPoolExecutor(12) as callers:
            answers = list(callers.map(ask, range(1, 25)))
        log = server.log.read_text()
        if server.process.poll() == -signal.SIGABRT and RUST_ABORT in log:
            pytest.skip("a Rust library asked for memory while a step had it all, and ended the process")
        assert server.process.poll() is None, log[-2000:]
        assert 200 in answers and {*answers} <= {200, 500, 503, "RemoteProtocolError", "ReadError"}
        limit(resource.RLIM_INFINITY)
        assert [ask(number) for number in range(30, 33)] == [200] * 3
