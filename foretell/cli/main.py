"""From words on a command line to the function that does it. Heavy imports wait until a command runs."""

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

# By name: the file it is in and what it is called there. Others' files are not read: together they take a while.
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
CALLERS_FAULT = 2
INTERRUPTED = 130
DEBUG = "FORETELL_DEBUG"


class Parser(argparse.ArgumentParser):
    """Argparse whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(CALLERS_FAULT, f"foretell: {message}; see '{self.prog} --help'\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it went."""
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
    except BrokenPipeError:  # the reader has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"foretell: {_one_line(error)}", file=sys.stderr)
        return 1
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        kind = type(error).__name__
        print(f"foretell: a fault of ours, {kind}: {_one_line(error)}; {DEBUG}=1 shows where", file=sys.stderr)
        return 1


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments, or an exit that names the nearest right one."""
    named = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    parser, commands = build_parser(named)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"there is no command {argv[0]!r}; {nearest(argv[0], COMMANDS)}")
    args, unknown = parser.parse_known_args(argv)
    inner: Parser = getattr(args, "parser", commands[args.command])  # a command may have commands of its own
    for word in unknown:
        if word.startswith("-"):
            flag = word.split("=")[0]
            inner.error(f"there is no option {flag}; {nearest(flag, inner._option_string_actions)}")
    if unknown:
        inner.error(f"unexpected {unknown[0]!r}; put a text of several words in quotes")
    return args


def build_parser(names: Iterable[str] = COMMANDS) -> tuple[Parser, dict[str, Parser]]:
    """The parser and those of these commands."""
    parser = Parser(prog="foretell", description="The same text, sooner: language models with speculative decoding.")
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
