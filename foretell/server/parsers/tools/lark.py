"""Text in the rules of a Lark grammar: special tokens of the vocabulary by their ids, everything else as strings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foretell.structured_output import ONE_LINE

ANY_TEXT = "/(?s:.*)/"
# JSON of arguments is on one line, as in training data. Keywords of their schemas that no grammar can enforce are left
# out: the schemas are often those of other programs.
CALL_JSON = ONE_LINE | {"lenient": True}


@dataclass(frozen=True)
class LarkTokens:
    """Spells text for one model; a special token is not the text of its name."""

    special: Mapping[str, int] = field(default_factory=dict)  # ids of the special tokens by their names

    def has(self, text: str) -> bool:
        """Return whether special tokens are part of a text."""
        return any(token is not None for _, token in self._pieces(text))

    def text(self, text: str) -> str:
        """Return the part of a rule that derives exactly this text."""
        return " ".join(json.dumps(piece) if token is None else f"<[{token}]>" for piece, token in self._pieces(text))

    def until(self, name: str, end: str) -> str:
        """Return the rules `name`: any text up to and including the first `end`."""
        if self.has(end):
            return f"{name}: {name}_text {self.text(end)}\n{name}_text: {ANY_TEXT}\n"
        return f"{name}[suffix={json.dumps(end)}]: {ANY_TEXT}\n"

    def trigger(self, name: str, start: str) -> str:
        """Return the rules `name`: any text up to and including the first `start`, from where on it is constrained."""
        if self.has(start):
            return f"{name}: {name}_text {self.text(start)}\n{name}_text: {ANY_TEXT}\n"
        return f"{name}[lazy]: {ANY_TEXT} {json.dumps(start)}\n"

    def _pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        for piece in self._names.split(text):
            if piece:
                yield piece, self.special.get(piece)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        names = sorted(self.special, key=len, reverse=True)  # of two that match, the longer
        return re.compile(f"({'|'.join(map(re.escape, names))})" if names else r"(?!)")


def json_rule(schema: dict[str, Any]) -> str:
    """Return the body of the rule of JSON that satisfies a schema of arguments."""
    return "%json " + json.dumps(schema | {"x-guidance": CALL_JSON}, ensure_ascii=False)
