"""Shared by commands: the command type, model and sampling flags, and output of results."""

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

MODEL_ARGUMENT = "model_argument"  # where the parser keeps a model that is named without --model


def add_model_argument(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the model as a first word, which may be left out; `main` stores it as --model."""
    parser.add_argument(MODEL_ARGUMENT, nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=help)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the engine and of speculation."""
    add_options(parser.add_argument_group("model"), EngineConfig)
    group = parser.add_argument_group("speculation")
    add_options(group, SpeculationConfig)
    group.add_argument(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help="""speculation settings in vLLM's format, such as '{"method": "ngram", "num_speculative_tokens": 4}'""",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sampling flags; defaults are the model's own."""
    title = "sampling (the model's generation config overrides these defaults)"
    add_options(parser.add_argument_group(title), SamplingParams)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for JSON output."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the JSON object to FILE")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that runs a model and reports."""
    add_output_arguments(parser)
    add_engine_arguments(parser)


def log(line: str) -> None:
    """Print a progress line on standard error."""
    print(line, file=sys.stderr, flush=True)


def load_llm(args: argparse.Namespace) -> LLM:
    """Load the model of the flags."""
    options = given_options(args, EngineConfig) | given_options(args, SpeculationConfig)
    with gc_paused():
        from foretell.llm import LLM

        return LLM(speculative_config=getattr(args, "speculative_config", None), **options)


def sampling_params(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    """Return the model's default sampling parameters, overridden by the flags."""
    return llm.default_params(**given_options(args, SamplingParams))


def check_sampling(args: argparse.Namespace) -> None:
    """Validate the sampling flags before a model is loaded."""
    SamplingParams(**given_options(args, SamplingParams))


def read_text(argument: str) -> str:
    """Return the argument, or standard input for "-"."""
    try:
        text = sys.stdin.read() if argument == "-" else argument
        text.encode()  # fails for bytes that a lenient decoder has let through
    except UnicodeError:
        where = "standard input" if argument == "-" else "the prompt"
        raise RequestError("prompt", f"{where} is not UTF-8; convert it, such as with iconv") from None
    if not text.strip():
        raise RequestError("prompt", "is empty; give some text, or - to read standard input")
    return text


def check_output_path(args: argparse.Namespace) -> None:
    """Check before any work that the output file can be written."""
    if args.out is not None:
        check_writable(args.out)


def output_result(result: Any, args: argparse.Namespace) -> None:
    """Print or write a result according to --json and --out."""
    if args.json:
        is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        print(json.dumps(result, ensure_ascii=not is_utf8))
    if args.out is not None:
        write_atomic(args.out, json.dumps(result, ensure_ascii=False, indent=2) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically; a pipe or a device is written directly."""
    path = path.resolve()  # follow a link instead of replacing it
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
    """Return the mask of new files' permissions, on Linux without changing it for a moment."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        return int(status.split("\nUmask:")[1].split()[0], 8)
    except (OSError, IndexError):  # another system
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


@dataclass(frozen=True)
class Command:
    """A command: its help line, its flags, and a function that runs it and returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def check_writable(path: Path, field: str = "out") -> None:
    """Raise unless a file can be written at `path`; `field` is the option that named it.

    Creates and deletes a temporary file in the folder, because permission bits do not show every read-only folder.
    """
    if path.is_dir():
        raise RequestError(field, f"{path} is a folder; name a file")
    real = path.resolve()  # a link is followed, as when the file is written
    if not real.parent.is_dir():
        raise RequestError(field, f"there is no folder {path.parent}; create it, or name a file in another folder")
    if real.exists() and not os.access(real, os.W_OK):
        raise RequestError(field, f"{path} is read-only; name another file")
    if real.exists() and not real.is_file():
        return  # a pipe or a device: written directly
    if reason := _refusal(real.parent):
        raise RequestError(field, f"{path} cannot be written: {reason}; name a file in another folder")


def check_folder_writable(path: Path, field: str = "out") -> None:
    """Raise unless files can be written into the folder `path`, which need not exist; it is not created."""
    if path.exists() and not path.is_dir():
        raise RequestError(field, f"{path} is a file; name a folder")
    real = path.resolve()
    nearest = next(each for each in (real, *real.parents) if each.exists())
    if reason := _refusal(nearest):
        raise RequestError(field, f"{path} cannot be written: {reason}; name another folder")


def _refusal(folder: Path) -> str | None:
    """Return why the system refuses a new file in `folder`, None if it does not."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
