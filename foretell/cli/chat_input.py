"""Lines of a chat: with editing and history on a terminal, plain from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from foretell.errors import RequestError
from foretell.utils.system import home

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT = "> "
HISTORY_FILE = "chat_history"


def line_reader(commands: Iterable[str], *, keep_history: bool) -> Callable[[], str | None]:
    """Return a function that reads the next message; None at the end of input. Ctrl-C only clears the line."""
    read = _editor(commands, keep_history) if on_terminal() else _plain_line

    def next_line() -> str | None:
        while True:
            try:
                return read()
            except EOFError:
                return None
            except KeyboardInterrupt:
                print()

    return next_line


def on_terminal() -> bool:
    """Return whether a person types and sees what is typed."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _plain_line() -> str:
    try:
        line = input(PROMPT if sys.stdin.isatty() else "")
        line.encode()  # bytes that are not text may have become surrogates
    except UnicodeError:
        raise RequestError("prompt", "standard input is not UTF-8; convert it, such as with iconv") from None
    return line


def _editor(commands: Iterable[str], keep_history: bool) -> Callable[[], str]:
    """Return the editor of prompt_toolkit; a paste of several lines is one message, Tab completes commands."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    session: PromptSession[str] = PromptSession(
        PROMPT,
        history=_history(home() / HISTORY_FILE if keep_history else None),
        completer=WordCompleter(sorted(commands), sentence=True),
        complete_while_typing=False,
        key_bindings=_newline_keys(),
    )
    return session.prompt


def _newline_keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def insert_newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path | None) -> History:
    """Return the history in a file that only the user can read, or in memory without one that can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        print(f"foretell: no history beyond this chat: {path}: {error.strerror}", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(path)
