"""A prompt of a benchmark workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation, or one text to complete.

    `turns` are the user messages that follow the first answer. `text` is completed as it is, instead of messages.
    `sampling` are the sampling parameters of the request itself, as in a user's trace. `fields` are all fields that
    decide the output, with their OpenAI names, for servers.
    """

    id: str
    task: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    turns: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_MAX_TOKENS
    prediction: str | None = None
    schema: Mapping[str, Any] | bool | None = None  # JSON schema of the output; true for any object
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> dict[str, Any]:
        """Return the body of an OpenAI request without its maximum length."""
        text = {"messages": list(self.messages)} if self.text is None else {"prompt": self.text}
        return {**text, **self.fields}


@dataclass(frozen=True)
class RequestParams:
    """Maximum output length and temperature of a request."""

    max_tokens: int
    temperature: float
