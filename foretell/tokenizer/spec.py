"""What a checkpoint says about its tokenizer, in whichever format it says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True)
class Parts:
    """All that a Tokenizer is made of."""

    backend: tokenizers.Tokenizer
    size: int
    named: Mapping[str, str]  # the texts of bos_token, eos_token and the like, as chat templates know them
    end_ids: frozenset[int]
    templates: Mapping[str, str]  # chat templates by name; "default" is the usual one


def unless_foreign(problem: BaseException) -> BaseException:
    """Return an error of the library; raise what ends the program, such as KeyboardInterrupt.

    The class of a panic can be imported from nowhere, so it is known by its name.
    """
    if isinstance(problem, Exception) or type(problem).__name__ == "PanicException":
        return problem
    raise problem
