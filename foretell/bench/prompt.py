"""What is asked in a bench."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation to be written.

    `turns` are asked one after the other, each when the last was answered. `text` is continued as it is, in the place
    of messages. `sampling` is what the request itself says, as those of a user's own trace do; `fields` is that and
    what else decides its text, in OpenAI's own words, for servers.
    """

    id: str
    task: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    turns: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_MAX_TOKENS
    prediction: str | None = None
    schema: Mapping[str, Any] | bool | None = None  # of the JSON that is wanted; true for any object
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> dict[str, Any]:
        """As a server is asked, but for how long it may be."""
        text = {"messages": list(self.messages)} if self.text is None else {"prompt": self.text}
        return {**text, **self.fields}
