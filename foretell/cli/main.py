"""Entry point of the command line. Heavy imports wait until a command runs."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import NoReturn

from foretell import __version__
from foretell.errors import ForetellError, RequestError
from foretell.options import nearest_flag, very_close

from .command_table import COMMANDS
from .common import MODEL_ARGUMENT, Command
from .help import PROGRAM, Overview, Parser

INTERRUPTED = 130  # exit code
DEBUG = "FORETELL_DEBUG"
INSTEAD = {"stop": f"kill the PID that '{PROGRAM} ps' shows"}  # by command of other programs
FOREIGN = re.compile(r"-[a-z]{2,}")  # llama.cpp has flags of several letters after one dash
SAME_AS = re.compile(r"same as (--[\w-]+)")  # in the help of a flag of another engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    replace_unencodable()
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


def replace_unencodable() -> None:
    """Write a question mark for a character that the encoding of an output stream lacks, such as ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments, or exit with one line that says what is wrong."""
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    name = next((name for name in (" ".join(argv[:2]), *argv[:1]) if name in COMMANDS), None)
    if name is None:
        explain_command(argv)
    command = load_command(name)
    parser = add_arguments(Parser(prog=f"{PROGRAM} {name}", description=command.help), command)
    words = argv[len(name.split()) :]
    refuse_foreign_flags(parser, words)
    args, unknown = parser.parse_known_args(words)
    inner: Parser = getattr(args, "parser", parser)  # a command may have subcommands
    for word in unknown:
        if word.startswith("-"):
            refuse_flag(inner, word.split("=")[0])
    if unknown:
        inner.error(f"unexpected {unknown[0]!r}; quote arguments with spaces")
    merge_model(args)
    return args


def explain_command(argv: list[str]) -> NoReturn:
    """Print the overview or the version, or refuse a command that does not exist."""
    parser, _ = build_parser([])
    if argv and not argv[0].startswith("-"):
        close = very_close(argv[0], COMMANDS)
        hint = f"; did you mean {close!r}?" if close else f"; {INSTEAD[argv[0]]}" if argv[0] in INSTEAD else ""
        parser.error(f"there is no command {argv[0]!r}{hint}")
    parser.parse_known_args(argv[:1])  # exits for --help and --version
    if argv:
        parser.error(f"there is no option {argv[0]} before the command")
    parser.print_help()
    parser.exit()


def refuse_foreign_flags(parser: Parser, words: Iterable[str]) -> None:
    """Refuse another engine's flag such as -tb before argparse takes it for -t with the value b."""
    known = parser._option_string_actions
    for flag in (word.split("=")[0] for word in words):
        if FOREIGN.fullmatch(flag) and flag not in known and flag[:2] in known:
            from foretell.server.foreign_flags import SWITCHES, WITH_VALUES

            if flag in (*SWITCHES, *WITH_VALUES):
                refuse_flag(parser, flag)


def refuse_flag(parser: Parser, flag: str) -> NoReturn:
    """Refuse a flag that the parser lacks: one that only a server has, or a mistyped one."""
    from foretell.server.foreign_flags import OPTIONAL_VALUE, SWITCHES, WITH_VALUES

    runs_model = "--max-model-len" in parser._option_string_actions
    if runs_model and flag in (*SWITCHES, *WITH_VALUES, *OPTIONAL_VALUE):
        parser.error(f"{flag} is an option of {PROGRAM} serve, which ignores it; leave it out")
    server = build_parser(["serve"])[1]["serve"]._option_string_actions.get(flag)
    if server is None:
        parser.error(f"there is no option {flag}{nearest_flag(flag, parser)}")
    if server.help == argparse.SUPPRESS:  # of another engine, without an equivalent
        parser.error(f"there is no option {flag}")
    same = SAME_AS.search(server.help or "")
    here = f"; here: {same[1]}" if same and same[1] in parser._option_string_actions else ""
    parser.error(f"{flag} is an option of {PROGRAM} serve{here}")


def merge_model(args: argparse.Namespace) -> None:
    """Make a model that is named as an argument the value of --model; refuse two different ones."""
    named = vars(args).pop(MODEL_ARGUMENT, None)
    if named is None:
        return
    if getattr(args, "model", named) != named:
        raise RequestError("model", f"is given twice, as {named!r} and as {args.model!r}; give one")
    args.model = named


def build_parser(names: Iterable[str] = COMMANDS) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the program, and the parsers of these commands by name."""
    parser = Overview()
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    commands: dict[str, Parser] = {}
    for name in names:
        command = load_command(name)
        made = subparsers.add_parser(name, prog=f"{PROGRAM} {name}", help=command.help, description=command.help)
        commands[name] = add_arguments(made, command)
    return parser, commands


def load_command(name: str) -> Command:
    """Import the module of a command and return the command."""
    entry = COMMANDS[name]
    command: Command = getattr(import_module(f"{__package__}.{entry.module}"), entry.attribute)
    return command


def add_arguments(parser: Parser, command: Command) -> Parser:
    """Add the arguments of a command to its parser."""
    command.add_arguments(parser)
    parser.set_defaults(run=command.run, parser=parser)
    return parser


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
