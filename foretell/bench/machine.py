"""Description of the machine for benchmark results."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from foretell.utils.system import cpu_name

if TYPE_CHECKING:
    from foretell.llm import LLM


def describe(llm: LLM) -> dict[str, Any]:
    """Return device, dtype, threads and versions that a model runs with."""
    import torch

    runner = llm.engine.runner
    on_gpu = runner.device.type == "cuda"
    return {
        **describe_host(),
        "device": torch.cuda.get_device_name(runner.device) if on_gpu else cpu_name(),
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def describe_host() -> dict[str, Any]:
    """Return processor, cores, system and Python version."""
    return {
        "device": cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
