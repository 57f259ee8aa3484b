"""foretell show: a model's family, size, format and context, and the drafters that fit it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.config import QUANTIZATIONS
from foretell.errors import ForetellError

from .common import Command, add_output_arguments, check_output_path, output_result
from .pairs import known_drafters, print_drafters
from .tables import print_columns

if TYPE_CHECKING:
    from foretell.hub import Checkpoint
    from foretell.models.config import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model on this machine: built-in name, folder, .gguf file or Hugging Face id")
    parser.add_argument(
        "--weights", action="store_true", help="list the weight matrices: stored format, run format, relative error"
    )
    parser.add_argument(
        "--quantization", "-q", default="auto", choices=QUANTIZATIONS, help="run format of --weights (default: auto)"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_output_path(args)
    from foretell.hub.stored import local_path

    path = local_path(args.model)
    found = describe(args.model, path)
    if args.weights:
        found["matrices"] = matrices(path, args.quantization)
    output_result(found, args)
    if not args.json:
        lists = ("drafters", "matrices")
        shown = {name: value for name, value in found.items() if name not in lists and value is not None}
        for device in ("on_cpu", "on_cuda"):
            if device in shown:
                shown[device] += f", weights in {shown.pop(f'format_{device}')}"
        print_columns(("", ""), [(label(name), in_words(name, value)) for name, value in shown.items()])
        print_drafters(found["drafters"])
        if args.weights:
            print()
            print_matrices(found["matrices"])
    return 0


def matrices(path: Path, quantization: str) -> list[dict[str, Any]]:
    """Return the stored and the run format of each matrix, and the error that running it so adds."""
    from dataclasses import asdict

    from foretell.build.model_source import choose_device, choose_quantization
    from foretell.config import EngineConfig
    from foretell.hub import open_checkpoint
    from foretell.models.load import choose_dtype
    from foretell.models.weight_report import weight_errors

    checkpoint, device = open_checkpoint(path), choose_device("auto")
    format = choose_quantization(EngineConfig(quantization=quantization), checkpoint, device)
    return [asdict(each) for each in weight_errors(checkpoint, format, choose_dtype(checkpoint, "auto", device))]


def print_matrices(found: list[dict[str, Any]]) -> None:
    """Print a row for each matrix, and what its errors are."""
    rows = [
        [
            each["tensor"],
            "x".join(map(str, each["shape"])),
            each["stored"],
            each["runs_as"],
            f"{each['max_error']:.2%}",
            f"{each['mean_error']:.2%}",
        ]
        for each in found
    ]
    print_columns(("tensor", "shape", "stored", "runs as", "max error", "mean error"), rows, right=(1, 4, 5))
    print(
        "\nErrors of running the stored weights as shown: largest difference / largest weight, mean difference / mean "
        "weight."
    )


def describe(name: str, path: Path) -> dict[str, Any]:
    """Return the facts of a model on this machine, read without its weights."""
    from foretell.hub import open_checkpoint

    checkpoint = open_checkpoint(path)
    config, reason = served_config(checkpoint)
    return {
        "model": name,
        "path": str(path),
        "family": None if config is None else family(config),
        "model_type": model_type(checkpoint),
        "format": "GGUF" if checkpoint.kind == "gguf" else "safetensors",
        "weights": weight_format(checkpoint),
        **sizes(path, config),
        "on_cpu": None if config is None else kernels(config, "cpu"),
        "on_cuda": None if config is None else kernels(config, "cuda"),
        "format_on_cpu": None if config is None else run_format(checkpoint, "cpu"),
        "format_on_cuda": None if config is None else run_format(checkpoint, "cuda"),
        "not_served": reason,
        "drafters": [] if config is None else fitting_drafters(name, checkpoint, config),
    }


def fitting_drafters(name: str, checkpoint: Checkpoint, config: ModelConfig) -> list[dict[str, Any]]:
    """Return the drafters that fit: those known for the model, those in its checkpoint, and those for any model."""
    from foretell.models.checkpoint_tensors import plain_name
    from foretell.models.weights import is_mtp_tensor

    known = known_drafters(name)
    kinds = {each["drafter"].partition(":")[0] for each in known}
    names = {plain_name(tensor) for tensor, _ in checkpoint.tensors()}
    found = {
        "mtp": "the module for multi-token prediction in the checkpoint" * any(is_mtp_tensor(e, names) for e in names),
        "assistant:FOLDER": "Google's assistant for this size" * (config.family == "gemma4"),
    }
    own = [
        {"drafter": drafter, "billions": None, "here": True, "note": note}
        for drafter, note in found.items()
        if note and drafter.partition(":")[0] not in kinds
    ]
    return own + known


def sizes(path: Path, config: ModelConfig | None) -> dict[str, int | None]:
    """Return the sizes of a model, by the planner's reading of its config if the model is not served.

    They are None where the planner does not model it either, such as for a hybrid.
    """
    from foretell.build.draft_compat import parameters
    from foretell.plan.model_shape import find_model_shape

    found: tuple[int | None, ...] = (None,) * 4
    if config is not None:
        found = (parameters(config), config.context, config.layers, config.vocab)
    else:
        with suppress(ForetellError):
            shape = find_model_shape(str(path), "model")
            found = (round(shape.weights), shape.context, shape.layers, shape.vocab)
    return dict(zip(("parameters", "context", "layers", "vocabulary"), found, strict=True))


def family(config: ModelConfig) -> str:
    """Return the title of the family as which a model is served."""
    from foretell.models.families import FAMILIES

    return FAMILIES[config.family].title


def model_type(checkpoint: Checkpoint) -> str:
    """Return the model type that the file states."""
    named = checkpoint.config.get("general.architecture" if checkpoint.kind == "gguf" else "model_type")
    return str(named or "unknown")


def weight_format(checkpoint: Checkpoint) -> str:
    """Return the data type or quantization of most weights, as the files state it."""
    if checkpoint.kind == "folder":
        text = checkpoint.config.get("text_config")
        configs = (checkpoint.config, text if isinstance(text, Mapping) else {})
        stated = (each.get(name) for each in configs for name in ("dtype", "torch_dtype"))
        return quantization(checkpoint) or str(next(filter(None, stated), "unknown"))
    from gguf import LlamaFileType

    try:
        return LlamaFileType(checkpoint.config["general.file_type"]).name.removeprefix("MOSTLY_")
    except (KeyError, ValueError):
        return "unknown"


def quantization(checkpoint: Checkpoint) -> str | None:
    """Return how a folder's weights are quantized; None for floats and for what is not supported."""
    try:
        return checkpoint.quantization
    except ForetellError:
        return None


def served_config(checkpoint: Checkpoint) -> tuple[ModelConfig | None, str | None]:
    """Return the architecture of the model, or why it cannot be served."""
    from foretell.models.checkpoint_tensors import text_tensors
    from foretell.models.hf_config import read_config

    try:
        config = read_config(checkpoint)
        list(text_tensors(checkpoint, config))
        return config, None
    except ForetellError as error:
        return None, str(error)


def kernels(config: ModelConfig, device: str) -> str:
    """Return what runs the model on a device type."""
    from foretell.models.fast_paths import missing_fast_path

    if missing := missing_fast_path(config, device, config.context):
        return f"torch: no kernel for {missing}"
    return "native library" if device == "cpu" else "Triton kernels"


def run_format(checkpoint: Checkpoint, device: str) -> str:
    """Return the format that weights run in by default on a device type."""
    import torch

    from foretell.build.model_source import choose_quantization
    from foretell.config import EngineConfig
    from foretell.models.load import choose_dtype

    place = torch.device(device)
    quantization = choose_quantization(EngineConfig(), checkpoint, place)
    return quantization or str(choose_dtype(checkpoint, "auto", place)).removeprefix("torch.")


def label(name: str) -> str:
    """Return the name of a fact for people."""
    return {"on_cpu": "on a CPU", "on_cuda": "on CUDA"}.get(name, name.replace("_", " "))


def in_words(name: str, value: Any) -> str:
    """Format a fact for people."""
    if name == "parameters":
        return f"{value / 1e9:.2f}B" if value >= 1e9 else f"{value / 1e6:.0f}M"
    return f"{value:,} tokens" if name in ("context", "vocabulary") else str(value)


SHOW = Command("describe a model and the drafters that fit it", add_arguments, run)
