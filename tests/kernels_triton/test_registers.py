"""Attention's kernels stay in registers: for what they keep elsewhere a device has memory taken, thread by thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[2]
BYTES = 512  # of a thread: on an H200, which could run 270,336, they are 132 MiB


def test_no_kernel_of_attention_needs_a_large_stack() -> None:
    """In a process of its own: here kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "bench" / "registers.py"), "--few"]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])["kernels"]
    assert {kernel["kernel"] for kernel in kernels} >= {"_paged_attention_kernel", "_draft_attention_kernel"}
    assert not [kernel for kernel in kernels if kernel["stack"] > BYTES]
