"""Where in a program something was asked, and errors that say so."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType

from foretell.errors import ForetellError

OURS = os.path.dirname(__file__) + os.sep


@dataclass(frozen=True)
class Place:
    """A line of a program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class ProgramError(ForetellError):
    """What went wrong in a program, and at which line. `__cause__` is the error itself."""

    def __init__(self, place: Place, error: BaseException) -> None:
        words = str(error) if isinstance(error, ForetellError) else f"{type(error).__name__}: {error}"
        super().__init__(f"{place}: {words}")
        self.place = place
        self.__cause__ = error


class Cancelled(ForetellError):
    """The program was ended before it was done."""

    def __init__(self) -> None:
        super().__init__("the program was cancelled")


def asking_place() -> Place:
    """The line outside this package that led here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    assert frame is not None, "somebody called"
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def failing_place(error: BaseException, program: CodeType) -> Place:
    """The program's own line that an error came through."""
    found = Place(program.co_filename, program.co_firstlineno, program.co_name)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is program:
            found = Place(program.co_filename, trace.tb_lineno, program.co_name)
        trace = trace.tb_next
    return found
