"""The argument parser of the program: short help with examples, all options with --help-all, errors on one line."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from typing import Any, NoReturn

from foretell.options import is_common, nearest

from .command_table import EXAMPLES, GROUPS

PROGRAM = "foretell"
ABOUT = "Lossless speculative decoding for language models; drafts only where it pays"
USAGE_ERROR = 2  # exit code
MAX_WIDTH = 100  # columns of a page of help
HELP_COLUMN = 32
WANTED: dict[Any, str] = {int: "an integer", float: "a number"}  # by type of an option


class Parser(argparse.ArgumentParser):
    """An argument parser whose --help lists the common options, and whose errors are one line."""

    def __init__(self, **settings: Any) -> None:
        if about := settings.get("description"):
            settings["description"] = f"{about[0].upper()}{about[1:]}."
        super().__init__(**settings | {"formatter_class": Formatter, "add_help": False, "allow_abbrev": False})
        self._positionals.title = "arguments"
        self.add_argument("-h", "--help", action=HelpAction, help="show this help and exit")
        self.add_argument("--help-all", action=HelpAction, help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        hint = "" if message.endswith("?") else f"; see '{self.prog} --help'"
        self.exit(USAGE_ERROR, f"{PROGRAM}: {message}{hint}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = nearest(str(value), map(str, action.choices))
            raise self._refusal(action, f"{value!r} is not known; {hint}")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            wanted = WANTED.get(action.type)
            raise self._refusal(action, f"{text!r} is not {wanted}" if wanted else error.message) from None

    def _match_argument(self, action: argparse.Action, pattern: str) -> int:
        try:
            return super()._match_argument(action, pattern)
        except argparse.ArgumentError as error:
            raise self._refusal(action, error.message) from None

    def _refusal(self, action: argparse.Action, reason: str) -> argparse.ArgumentError:
        """Return an error that names an option by its first long name, without those of other engines."""
        names = [name for name in action.option_strings if name.startswith("--")] or action.option_strings
        return argparse.ArgumentError(None, f"{names[0] if names else action.metavar or action.dest}: {reason}")

    def format_usage(self) -> str:
        formatter = Formatter(self.prog)
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        words = [formatter.argument(action) for action in shown if not action.option_strings]
        words += [formatter.invocation(action) for action in shown if action.option_strings and action.required]
        return " ".join(["usage:", self.prog, *words, "[options]"]) + "\n"

    def format_help(self, everything: bool = False) -> str:
        """Return the page of help; with `everything` it has the rarely used options too."""
        formatter = Formatter(self.prog)
        formatter.add_text(self.description)
        left_out = 0
        for group in self._action_groups:
            if group.description == argparse.SUPPRESS:  # of another page of the same command
                continue
            actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            shown = [action for action in actions if everything or is_common(action)]
            left_out += len(actions) - len(shown)
            formatter.start_section(group.title)
            formatter.add_arguments(shown)
            formatter.end_section()
        parts = [self.format_usage(), formatter.format_help(), *example_lines(self.prog)]
        if left_out:
            parts.append(f"{left_out} more options: {self.prog} --help-all\n")
        return "\n".join(parts)


class Formatter(argparse.HelpFormatter):
    """Lists each option by its first long name, and by a name of one letter if it has one."""

    def __init__(self, prog: str) -> None:
        columns = min(MAX_WIDTH, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=HELP_COLUMN, width=columns - 2)

    def argument(self, action: argparse.Action) -> str:
        """Return the placeholder of a positional argument, or of an option's value."""
        return self._format_args(action, action.dest if not action.option_strings else action.dest.upper())

    def invocation(self, action: argparse.Action) -> str:
        """Return an option with the placeholder of its value."""
        names = action.option_strings
        name = next((name for name in names if name.startswith("--")), names[0])
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"{name}, --no-{name.removeprefix('--')}"
        shown = ", ".join([*(each for each in names if len(each) == 2), name])
        return shown if action.nargs == 0 else f"{shown} {self.argument(action)}"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return self.invocation(action) if action.option_strings else super()._format_action_invocation(action)


class HelpAction(argparse._HelpAction):
    """Prints a page of help and exits; --help-all prints all of it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser), "the class of all parsers of the program"
        print(parser.format_help(everything="--help-all" in self.option_strings), end="")
        parser.exit()


class Overview(Parser):
    """The parser of the program itself, whose help lists the commands by group."""

    def __init__(self) -> None:
        super().__init__(prog=PROGRAM, description=ABOUT)

    def format_help(self, everything: bool = False) -> str:
        lines = [f"usage: {PROGRAM} COMMAND [options]", "", f"{ABOUT}."]
        for title, commands in GROUPS.items():
            lines += ["", f"{title}:", *(f"  {name:12} {entry.summary}" for name, entry in commands.items())]
        return "\n".join([*lines, "", *example_lines(PROGRAM), f"{PROGRAM} COMMAND --help describes a command.\n"])


def example_lines(prog: str) -> Iterator[str]:
    """Yield the examples of a page of help."""
    lines = [f"  {PROGRAM} {each}\n" for each in EXAMPLES.get(prog.removeprefix(PROGRAM).strip(), ())]
    if lines:
        yield "".join(["examples:\n", *lines])
