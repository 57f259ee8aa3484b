"""Panics of the tokenizers library, which is written in Rust: Python gets them as a BaseException."""

from __future__ import annotations


def unless_foreign(problem: BaseException) -> BaseException:
    """Return an error of the library; raise what ends the program, such as KeyboardInterrupt.

    The class of a panic can be imported from nowhere, so it is known by its name.
    """
    if isinstance(problem, Exception) or type(problem).__name__ == "PanicException":
        return problem
    raise problem
