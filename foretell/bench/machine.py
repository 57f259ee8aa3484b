"""What a reader needs to know of the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.llm import LLM


def describe(llm: LLM) -> dict[str, Any]:
    """Where a model runs, and with what."""
    import torch

    runner = llm.engine.runner
    on_gpu = runner.device.type == "cuda"
    return {
        **describe_host(),
        "device": torch.cuda.get_device_name(runner.device) if on_gpu else processor(),
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def describe_host() -> dict[str, Any]:
    """The machine itself."""
    return {
        "device": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def processor() -> str:
    """The name of the CPU, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
