"""What several commands share: model and sampling flags, and where results go."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.options import add_options, given_options
from foretell.sampling_params import SamplingParams
from foretell.utils.system import gc_paused

if TYPE_CHECKING:
    from foretell.llm import LLM


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for the model and for guessing ahead."""
    add_options(parser.add_argument_group("model"), EngineConfig)
    group = parser.add_argument_group("speculation")
    add_options(group, SpeculationConfig)
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help="""vLLM's form, such as '{"method": "ngram", "num_speculative_tokens": 4}'""",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for how tokens are drawn; what is left out is the model's own default."""
    add_options(parser.add_argument_group("sampling"), SamplingParams)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for results that programs read."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the JSON object to FILE")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that runs a model and reports."""
    add_output_arguments(parser)
    add_engine_arguments(parser)


def log(line: str) -> None:
    """Print a progress line on standard error."""
    print(line, file=sys.stderr, flush=True)


def load_llm(args: argparse.Namespace) -> LLM:
    """The model the flags name."""
    options = given_options(args, EngineConfig) | given_options(args, SpeculationConfig)
    with gc_paused():
        from foretell.llm import LLM

        return LLM(speculative_config=getattr(args, "speculative_config", None), **options)


def sampling_params(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The model's defaults with the flags on top."""
    return llm.default_params(**given_options(args, SamplingParams))


def check_sampling(args: argparse.Namespace) -> None:
    """Refuse wrong values before a model is loaded."""
    SamplingParams(**given_options(args, SamplingParams))


def read_text(argument: str) -> str:
    """The text itself, or standard input for "-"."""
    try:
        text = sys.stdin.read() if argument == "-" else argument
    except UnicodeDecodeError as error:
        raise RequestError("prompt", f"standard input is not text in {error.encoding}") from None
    if not text.strip():
        raise RequestError("prompt", "is empty; give it some text, or - to read standard input")
    return text


def check_out(args: argparse.Namespace) -> None:
    """Refuse a place that cannot be written to before any work is done."""
    path: Path | None = args.out
    if path is None:
        return
    if path.is_dir():
        raise RequestError("out", f"{path} is a folder; name a file")
    if not path.resolve().parent.is_dir():
        raise RequestError("out", f"there is no folder {path.parent}")


def give(result: Any, args: argparse.Namespace) -> None:
    """Print or write a result, as the flags say; a file is written whole or not at all."""
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
    if args.out is not None:
        write_whole(args.out, json.dumps(result, ensure_ascii=False, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`, leaving nothing half-written; a pipe or a device is written to as it is."""
    path = path.resolve()  # through a link, not in its place
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@dataclass(frozen=True)
class Command:
    """Its line in `foretell --help`, its flags, and the function that runs it and gives the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
