"""foretell show: a model's family, size, format and context, and the drafters that fit it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import ForetellError

from .common import Command, add_output_arguments, check_output_path, output_result
from .pairs import drafter_rows, known_drafters
from .tables import print_columns

if TYPE_CHECKING:
    from foretell.hub import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model on this machine: built-in name, folder, .gguf file or Hugging Face id")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_output_path(args)
    from foretell.hub.stored import local_path

    found = describe(args.model, local_path(args.model))
    output_result(found, args)
    if not args.json:
        shown = {name: value for name, value in found.items() if name != "drafters" and value is not None}
        print_columns(("", ""), [(name.replace("_", " "), in_words(name, value)) for name, value in shown.items()])
        print("\ndrafters:")
        print_columns(("", "", ""), drafter_rows(found["drafters"]))
    return 0


def describe(name: str, path: Path) -> dict[str, Any]:
    """Return the facts of a model on this machine, read without its weights."""
    from foretell.hub import open_checkpoint
    from foretell.plan.model_shape import find_model_shape

    checkpoint = open_checkpoint(path)
    shape = find_model_shape(str(path), "model")
    return {
        "model": name,
        "path": str(path),
        "family": family(checkpoint),
        "parameters": round(shape.weights),
        "format": "GGUF" if checkpoint.kind == "gguf" else "safetensors",
        "weights": weight_format(checkpoint),
        "context": shape.context,
        "layers": shape.layers,
        "vocabulary": shape.vocab,
        "not_served": reason_not_served(checkpoint),
        "drafters": known_drafters(name),
    }


def family(checkpoint: Checkpoint) -> str:
    """Return the model type that the file states."""
    named = checkpoint.config.get("general.architecture" if checkpoint.kind == "gguf" else "model_type")
    return str(named or "unknown")


def weight_format(checkpoint: Checkpoint) -> str:
    """Return the data type or quantization of most weights, as the files state it."""
    if checkpoint.kind == "folder":
        return str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "unknown")
    from gguf import LlamaFileType

    try:
        return LlamaFileType(checkpoint.config["general.file_type"]).name.removeprefix("MOSTLY_")
    except (KeyError, ValueError):
        return "unknown"


def reason_not_served(checkpoint: Checkpoint) -> str | None:
    """Return why the model cannot be served; None if it can."""
    from foretell.models.hf_config import read_config

    try:
        read_config(checkpoint)
    except ForetellError as error:
        return str(error)
    return None


def in_words(name: str, value: Any) -> str:
    """Format a fact for people."""
    if name == "parameters":
        return f"{value / 1e9:.2f}B" if value >= 1e9 else f"{value / 1e6:.0f}M"
    return f"{value:,} tokens" if name in ("context", "vocabulary") else str(value)


SHOW = Command("describe a model and the drafters that fit it", add_arguments, run)
