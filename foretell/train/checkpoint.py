"""Where a run stands, in a file: weights, moments and numbers. Written whole or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretell.errors import RequestError

FILE = "checkpoint.safetensors"


@dataclass
class TrainingState:
    """The numbers of a run."""

    step: int = 0
    elapsed: float = 0.0  # seconds of training, over all its pieces
    best: float = 0.0  # accepted per step, of the drafter that was kept
    tokens: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""  # the hash of what is trained on
    target_hash: str = ""  # of the target's files; empty in checkpoints of older versions


def save_checkpoint(folder: Path, standing: TrainingState, tensors: dict[str, Tensor]) -> None:
    """Replace the last one."""
    part = folder / f".{FILE}.part"
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(kept, part, {"standing": json.dumps(asdict(standing))})
    os.replace(part, folder / FILE)


def load_checkpoint(folder: Path) -> tuple[TrainingState, dict[str, Tensor]]:
    """The last one."""
    path = folder / FILE
    if not path.is_file():
        raise RequestError("resume", f"there is no checkpoint in {folder}; leave --resume out to begin there")
    try:
        with safe_open(path, "pt") as file:
            standing = TrainingState(**json.loads(file.metadata()["standing"]))
            names: list[str] = list(file.keys())
            return standing, {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RequestError("resume", f"{path} cannot be read: {error}") from None
