"""foretell pull, foretell models: what is here, and bringing more."""

from __future__ import annotations

import argparse
import sys

from .command import Command


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a built-in name or a Hugging Face id")


def _pull(args: argparse.Namespace) -> int:
    from foretell.hub import pull

    print(pull(args.name, _say))
    return 0


def _list(args: argparse.Namespace) -> int:
    from foretell.hub import DEFAULT_MODEL, local_models

    for model in local_models():
        state = "here" if model.present else f"foretell pull {model.name}"
        mark = " (default)" if model.name == DEFAULT_MODEL else ""
        print(f"{model.name:32} {model.size / 1e6:10.1f} MB   {state}{mark}")
    return 0


PULL = Command("bring a model to this machine", _add_name, _pull)
LIST = Command("list the built-in models and those in the cache", lambda parser: None, _list)
