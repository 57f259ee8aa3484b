"""Tool call parsers by model family."""

from __future__ import annotations

from .base import ToolCallParser
from .hermes import START_TAG as HERMES_TAG
from .hermes import HermesParser
from .llama3 import TAG as LLAMA3_TAG
from .llama3 import Llama3Parser
from .mistral import TAG as MISTRAL_TAG
from .mistral import MistralParser

TOOL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}
TAGS = {"hermes": HERMES_TAG, "mistral": MISTRAL_TAG, "llama3": LLAMA3_TAG}


def detect_tool_parser(template: str | None, configured: str = "auto") -> str | None:
    """Return the configured tool parser, or the one for the chat template; None if it supports no tools."""
    if template is None or "tools" not in template or configured == "none":
        return None
    if configured != "auto":
        return configured
    matching = [name for name, tag in TAGS.items() if tag in template]
    if not matching and '"parameters":' in template:  # Llama 3.2 has no tag
        matching = ["llama3"]
    return matching[0] if matching else None
