"""foretell rm: remove models and packed weights."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from foretell.errors import RequestError

from .common import Command, add_output_arguments, check_output_path, log, output_result

if TYPE_CHECKING:
    from foretell.hub.stored import StoredFiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="built-in name or Hugging Face id")
    parser.add_argument(
        "--packed",
        action="store_true",
        help="remove only packed weights, which the next start makes again; without MODEL those of all models",
    )
    parser.add_argument("-y", "--yes", action="store_true", help="remove without asking")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_output_path(args)
    files = files_to_remove(args.models, args.packed)
    for each in files:
        log(f"{each.about}: {each.path} ({each.size / 1e6:.1f} MB)")
    if files and not (args.yes or _confirm(files)):
        log("nothing was removed")
        return 1
    for each in files:
        each.remove()
    total = sum(each.size for each in files)
    output_result({"removed": [str(each.path) for each in files], "bytes": total}, args)
    if not args.json:
        print(f"removed {total / 1e6:.1f} MB" if files else "there is nothing to remove")
    return 0


def files_to_remove(models: list[str], packed_only: bool) -> list[StoredFiles]:
    """Return the files of these models, without duplicates."""
    from foretell.hub.stored import packed_weights, stored_model

    if not models and not packed_only:
        raise RequestError("model", "is missing; `foretell list` lists the models on this machine")
    if not models:
        return packed_weights()
    found: list[StoredFiles] = []
    for name in models:
        model = stored_model(name)
        found += [*([] if packed_only else [model]), *packed_weights(model.path)]
    return list(dict.fromkeys(found))


def _confirm(files: list[StoredFiles]) -> bool:
    if not sys.stdin.isatty():
        raise RequestError("rm", "add --yes: there is no terminal to ask")
    total = sum(each.size for each in files) / 1e6
    try:
        return input(f"remove {total:.1f} MB? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


RM = Command("remove models and the packed weights made from them", add_arguments, run)
