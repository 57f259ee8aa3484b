"""Tokenizer specification read from a checkpoint, and errors of the tokenizers library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True)
class TokenizerSpec:
    """Everything a Tokenizer is built from."""

    backend: tokenizers.Tokenizer
    size: int
    named: Mapping[str, str]  # bos_token, eos_token and so on, as chat templates name them
    end_ids: frozenset[int]
    templates: Mapping[str, str]  # chat templates by name; "default" is used without tools
    fim: Mapping[str, int] = field(default_factory=dict)  # fill-in-the-middle tokens that the file names, by role


def library_error(problem: BaseException) -> BaseException:
    """Return an error of the library; re-raise what ends the program, such as KeyboardInterrupt.

    The library is written in Rust, and a panic reaches Python as a BaseException. Its class cannot be imported, so it
    is recognized by name.
    """
    if isinstance(problem, Exception) or type(problem).__name__ == "PanicException":
        return problem
    raise problem
