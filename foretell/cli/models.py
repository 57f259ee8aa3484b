"""foretell pull and foretell models: download models and list those on this machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from .common import Command, add_output_arguments, check_output_path, log, output_result


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


def _list(args: argparse.Namespace) -> int:
    from foretell.hub import DEFAULT_MODEL, local_models
    from foretell.hub.catalog import packed_folder

    check_output_path(args)
    models = local_models()
    output_result(
        [asdict(model) | {"path": str(model.path), "default": model.name == DEFAULT_MODEL} for model in models], args
    )
    for model in () if args.json else models:
        state = "installed" if model.present else f"foretell pull {model.name}"
        mark = " (default)" if model.name == DEFAULT_MODEL else ""
        print(f"{model.name:32} {model.size / 1e6:10.1f} MB   {state}{mark}")
    packed = sum(file.stat().st_size for file in packed_folder().glob("*") if file.is_file())
    if packed and not args.json:
        print(f"{'packed weights cache':32} {packed / 1e6:10.1f} MB   can be deleted: {packed_folder()}")
    return 0


PULL = Command("download a model", _add_pull_arguments, _pull)
LIST = Command("list the built-in models and those in the cache", add_output_arguments, _list)
