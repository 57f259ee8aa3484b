"""How models write calls of tools, by family."""

from __future__ import annotations

from .base import ToolCallParser
from .hermes import OPENS as HERMES_MARK
from .hermes import HermesParser
from .llama3 import TAG as LLAMA3_MARK
from .llama3 import Llama3Parser
from .mistral import MARK as MISTRAL_MARK
from .mistral import MistralParser

TOOL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}
MARKS = {"hermes": HERMES_MARK, "mistral": MISTRAL_MARK, "llama3": LLAMA3_MARK}


def detect_tool_parser(template: str | None, wanted: str = "auto") -> str | None:
    """Whose calls a model writes: as it was told, or by what its chat template shows. None: it takes no tools."""
    if template is None or "tools" not in template or wanted == "none":
        return None
    if wanted != "auto":
        return wanted
    found = [name for name, mark in MARKS.items() if mark in template]
    if not found and '"parameters":' in template:  # Llama 3.2 names no tag
        found = ["llama3"]
    return found[0] if found else None
