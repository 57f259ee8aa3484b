"""Entry point of the command line. Heavy imports wait until a command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from foretell import __version__
from foretell.errors import ForetellError
from foretell.options import nearest

from .common import Command

# By name: module and attribute. Only the module of the given command is imported, which keeps the start fast.
COMMANDS = {
    "demo": ("demo", "DEMO"),
    "generate": ("generate", "GENERATE"),
    "chat": ("chat", "CHAT"),
    "serve": ("serve", "SERVE"),
    "deploy": ("serve", "DEPLOY"),
    "bench": ("bench", "BENCH"),
    "plan": ("plan", "PLAN"),
    "tune": ("tune", "TUNE"),
    "certify": ("certify", "CERTIFY"),
    "train": ("train", "TRAIN"),
    "export": ("train", "EXPORT"),
    "explain": ("explain", "EXPLAIN"),
    "pairs": ("pairs", "PAIRS"),
    "check-pair": ("pairs", "CHECK_PAIR"),
    "pull": ("models", "PULL"),
    "models": ("models", "LIST"),
}
USAGE_ERROR = 2  # exit code
INTERRUPTED = 130  # exit code
DEBUG = "FORETELL_DEBUG"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"foretell: {message}; see '{self.prog} --help'\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        args = parse(list(sys.argv[1:] if argv is None else argv))
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except ForetellError as error:
        print(f"foretell: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("foretell: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"foretell: {_one_line(error)}", file=sys.stderr)
        return 1
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        kind = type(error).__name__
        print(f"foretell: internal error, {kind}: {_one_line(error)}; {DEBUG}=1 shows the traceback", file=sys.stderr)
        return 1


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments, or exit with the nearest valid name."""
    named = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    parser, commands = build_parser(named)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"there is no command {argv[0]!r}; {nearest(argv[0], COMMANDS)}")
    args, unknown = parser.parse_known_args(argv)
    inner: Parser = getattr(args, "parser", commands[args.command])  # a command may have subcommands
    for word in unknown:
        if word.startswith("-"):
            flag = word.split("=")[0]
            inner.error(f"there is no option {flag}; {nearest(flag, inner._option_string_actions)}")
    if unknown:
        inner.error(f"unexpected {unknown[0]!r}; quote arguments with spaces")
    return args


def build_parser(names: Iterable[str] = COMMANDS) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and the parsers of these commands."""
    parser = Parser(
        prog="foretell",
        description="Lossless speculative decoding for language models, never slower than plain decoding.",
    )
    parser.add_argument("--version", action="version", version=f"foretell {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, Parser] = {}
    for name in names:
        command = _command(name)
        commands[name] = subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_arguments(commands[name])
        commands[name].set_defaults(run=command.run)
    return parser, commands


def _command(name: str) -> Command:
    file, noun = COMMANDS[name]
    command: Command = getattr(import_module(f"{__package__}.{file}"), noun)
    return command


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
