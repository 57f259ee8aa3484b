"""Loads damaged quantized checkpoints, one after the other, in a process of its own with limited memory.

`python -m tests.attack.fuzz_quantized SEED COUNT FOLDER` prints what `tests.attack.fuzz_files` prints.
"""

from __future__ import annotations

import json
import random
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from foretell.hub import open_checkpoint
from foretell.models.load import load_model
from tests.attack.fuzz_files import damaged, limit_resources, put_invalid, try_all
from tests.hub.formats import FORMATS
from tests.quantized_folder import write_quantized_folder

TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32)
SIZES = (0, 1, 2, 3, 31, 1 << 12)


def read_all(folder: Path) -> None:
    """Load the model, and decode every tensor that is not part of it."""
    checkpoint = open_checkpoint(folder)
    load_model(checkpoint)
    for _, tensor in checkpoint.tensors():
        tensor.load()


def whole_model(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return config and tensors, as copies: the file is written again while they are in use."""
    tensors = load_file(folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text()), {name: each.clone() for name, each in tensors.items()}


def damaged_tensor(tensors: dict[str, torch.Tensor], draw: random.Random) -> None:
    """Give one tensor another type, shape, name or content."""
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    match draw.randrange(5):
        case 0:
            tensors[name] = tensor.contiguous().view(-1).view(torch.uint8).clone().to(draw.choice(TYPES))
        case 1:
            shape = [draw.choice((*tensor.shape, *SIZES)) for _ in range(draw.choice((0, 1, 2, 2, 3)))]
            shape = shape if torch.Size(shape).numel() < 1 << 16 else [3]
            tensors[name] = torch.zeros(shape, dtype=tensor.dtype)
        case 2:
            tensors[draw.choice(sorted(tensors))] = tensor
        case 3:
            content = torch.tensor(list(draw.randbytes(max(1, tensor.nbytes))), dtype=torch.uint8)
            tensors[name] = content[: tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
        case _:
            pass  # it is missing


def main(seed: int, count: int, folder: Path) -> None:
    torch.set_num_threads(1)  # threads wait for each other on busy cores
    models = {name: write_quantized_folder(folder / name.replace(" ", "-"), name)[0] for name in FORMATS}
    whole = {name: whole_model(path) for name, path in models.items()}
    limit_resources()

    def attempt(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        name = draw.choice(sorted(models))
        config, tensors = deepcopy(whole[name])
        content, kind = save(tensors), draw.randrange(3)
        if kind == 0:
            for _ in range(draw.choice((1, 1, 3))):
                put_invalid(config["quantization_config"], draw)
        elif kind == 1:
            content = damaged(content, draw)
        else:
            for _ in range(draw.choice((1, 1, 3))):
                damaged_tensor(tensors, draw)
            content = save({name: tensor.clone() for name, tensor in tensors.items()})
        (models[name] / "config.json").write_text(json.dumps(config))
        (models[name] / "model.safetensors").write_bytes(content)
        read_all(models[name])

    for name, path in models.items():  # undamaged
        assert name and read_all(path) is None
    try_all("quantized", attempt, count)
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
