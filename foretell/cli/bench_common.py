"""What several benches share: flags of several values, and the target before it is loaded."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from foretell.config import EngineConfig
from foretell.options import given_options

if TYPE_CHECKING:
    from foretell.build import Opened


def look_at(args: argparse.Namespace) -> Opened:
    """The target, before it is loaded."""
    from foretell.build import open_model, say_on_stderr

    config = EngineConfig(**given_options(args, EngineConfig))
    return open_model(config.model, config, say_on_stderr)


def words(text: str) -> tuple[str, ...]:
    """Words between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(float(word) for word in words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1") from None


def wholes(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 2,4,8") from None
