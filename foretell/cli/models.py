"""foretell pull and foretell list (or models): download models, list those on this machine and what is supported."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from .common import Command, add_output_arguments, check_output_path, log, output_result
from .tables import print_columns

if TYPE_CHECKING:
    from foretell.hub.catalog import LocalModel


def _add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="built-in name or Hugging Face id")
    parser.add_argument("--revision", help="branch, tag or commit of the Hugging Face repository (default: main)")
    add_output_arguments(parser)


def _pull(args: argparse.Namespace) -> int:
    from foretell.hub import pull

    check_output_path(args)
    path = pull(args.name, log, args.revision)
    output_result({"name": args.name, "revision": args.revision, "path": str(path)}, args)
    if not args.json:
        print(path)
    return 0


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--supported", action="store_true", help="list the model families that can be served instead")
    add_output_arguments(parser)


def _list(args: argparse.Namespace) -> int:
    from foretell.hub import DEFAULT_MODEL, local_models

    check_output_path(args)
    if args.supported:
        return _list_families(args)
    models = local_models()
    output_result(
        [asdict(model) | {"path": str(model.path), "default": model.name == DEFAULT_MODEL} for model in models], args
    )
    if not args.json:
        print_columns(("model", "size", ""), rows(models), right=(1,))
    return 0


def _list_families(args: argparse.Namespace) -> int:
    from foretell.hub.quantized.table import FORMAT_TABLE
    from foretell.models.families import FAMILIES, family_table

    names = ("family", "formats", "cpu", "cuda", "run_with_real_weights", "tested")
    found = [dict(zip(names, row, strict=True)) for row in family_table()]
    types = [{"model_types": [*family.model_types], "gguf": [*family.gguf]} for family in FAMILIES.values()]
    output_result([each | more for each, more in zip(found, types, strict=True)], args)
    if not args.json:
        print_columns(("family", "formats", "CPU", "CUDA", "real weights"), [row[:5] for row in family_table()])
        print("\nReal weights: the model that was run, if any.")
        print("Tiny random models agree with those of transformers:\n")
        print_columns(("family", "compared"), [(row[0], row[5]) for row in family_table()])
        print("\nQuantized safetensors, by quant_method in the config:\n")
        print_columns(("method", "what is read", "runs on a CPU as"), FORMAT_TABLE)
        print("\nGGUF files: Q4_0 runs on a CPU as int4, other quantized types as int8.")
    return 0


def rows(models: Iterable[LocalModel]) -> list[tuple[str, str, str]]:
    """Return a table of models with their sizes, and of the packed weights."""
    from foretell.hub import DEFAULT_MODEL
    from foretell.hub.stored import packed_weights

    found = [
        (
            model.name,
            megabytes(model.size),
            ("installed" if model.present else f"foretell pull {model.name}")
            + (" (default)" if model.name == DEFAULT_MODEL else ""),
        )
        for model in models
    ]
    if packed := sum(each.size for each in packed_weights()):
        found.append(("packed weights", megabytes(packed), "made at the first start; foretell rm --packed"))
    return found


def megabytes(size: int) -> str:
    """Format a size in bytes."""
    return f"{size / 1e6:,.1f} MB"


PULL = Command("download a model", _add_pull_arguments, _pull)
LIST = Command("list the built-in models and those in the cache", _add_list_arguments, _list)
