"""Positions in a program's source, and errors that name them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType

from foretell.errors import ForetellError

PACKAGE_FOLDER = os.path.dirname(__file__) + os.sep


@dataclass(frozen=True)
class Position:
    """A line of a program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class ProgramError(ForetellError):
    """An error in a program with its line. `__cause__` is the original error."""

    def __init__(self, place: Position, error: BaseException) -> None:
        reason = str(error) if isinstance(error, ForetellError) else f"{type(error).__name__}: {error}"
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.__cause__ = error


class Cancelled(ForetellError):
    """The program was cancelled before it was done."""

    def __init__(self) -> None:
        super().__init__("the program was cancelled")


def caller_position() -> Position:
    """Return the innermost line outside this package on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame = frame.f_back
    assert frame is not None, "the call came from outside this package"
    return Position(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def error_position(error: BaseException, program: CodeType) -> Position:
    """Return the program's own line in an error's traceback."""
    found = Position(program.co_filename, program.co_firstlineno, program.co_name)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is program:
            found = Position(program.co_filename, trace.tb_lineno, program.co_name)
        trace = trace.tb_next
    return found
