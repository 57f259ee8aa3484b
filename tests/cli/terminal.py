"""A program in a pseudo-terminal, typed at like a person does."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.waiting import TIMEOUT

PROMPT = ">"
CODES = re.compile(r"\x1b(\[[\d;?]*[a-zA-Z]|[=>])")


class Terminal:
    """`foretell` with standard input, output and error on a pseudo-terminal."""

    def __init__(self, *words: str, home: Path) -> None:
        self._leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, (24, 80))
        env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "FORETELL_HOME": str(home)}
        env["FORETELL_NATIVE"] = "0"  # the library would be compiled again for a new home
        streams = {"stdin": follower, "stdout": follower, "stderr": follower}
        self.child = subprocess.Popen([sys.executable, "-m", "foretell", *words], env=env, **streams)  # type: ignore[call-overload]
        os.close(follower)
        self.seen = ""

    def type(self, keys: str, *, at_prompt: bool = True) -> None:
        """Type keys, by default once the prompt is shown: earlier ones are not for the editor."""
        if at_prompt:
            self.wait_for(PROMPT)
        os.write(self._leader, keys.encode())

    def wait_for(self, text: str) -> str:
        """Wait for a text on the screen, and return and forget all up to its end."""
        self._read_until(lambda: text in self.seen)
        before, found, self.seen = self.seen.partition(text)
        return before + found

    def wait_for_more(self, characters: int) -> None:
        """Wait for so many characters on the screen."""
        self._read_until(lambda: len(self.seen) >= characters)

    def _read_until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 2 * TIMEOUT
        while not holds():
            assert time.monotonic() < until, f"the screen ends with {self.seen[-300:]!r}"
            if select.select([self._leader], [], [], 1)[0]:
                self.seen = CODES.sub("", self.seen + os.read(self._leader, 4096).decode(errors="replace"))

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C while no line is edited: the program has no controlling terminal to do so."""
        self.child.send_signal(signal.SIGINT)

    def leave(self) -> int:
        """Press Ctrl-D and return the exit code."""
        self.type("\x04")
        return self.child.wait(TIMEOUT)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._leader)
