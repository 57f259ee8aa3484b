"""Tool call parsers by model family."""

from __future__ import annotations

from foretell.server.generic_tools import GENERIC_PARSER, knows_tools

from .base import ToolCallParser
from .gemma import FunctionGemmaParser, Gemma4Parser
from .glm import KEY as GLM_TAG
from .glm import GlmParser
from .harmony import CHANNEL as HARMONY_TAG
from .harmony import HarmonyParser
from .hermes import START_TAG as HERMES_TAG
from .hermes import HermesParser
from .llama3 import TAG as LLAMA3_TAG
from .llama3 import Llama3Parser
from .mistral import TAG as MISTRAL_TAG
from .mistral import MistralParser
from .qwen3_coder import FUNCTION as QWEN3_CODER_TAG
from .qwen3_coder import Qwen3CoderParser

TOOL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
    "glm": GlmParser,
    "gemma4": Gemma4Parser,
    "functiongemma": FunctionGemmaParser,
    "harmony": HarmonyParser,
}
# By which a chat template is recognized, the more special formats first: several share a tag.
TAGS = {
    "harmony": HARMONY_TAG,
    "gemma4": Gemma4Parser.start_tag,
    "functiongemma": FunctionGemmaParser.start_tag,
    "qwen3_coder": QWEN3_CODER_TAG,
    "glm": GLM_TAG,
    "hermes": HERMES_TAG,
    "mistral": MISTRAL_TAG,
    "llama3": LLAMA3_TAG,
}
SPECIAL_TOKENS = ("mistral", "harmony", "gemma4", "functiongemma")  # formats whose tags are special tokens


def detect_tool_parser(template: str | None, configured: str = "auto") -> str | None:
    """Return the configured tool parser, or the one for the chat template; None if there are no tool calls.

    A template that knows no tools gets the generic format: only the described format can be expected of its model.
    """
    if template is None or configured == "none":
        return None
    if not knows_tools(template):
        return GENERIC_PARSER
    if configured != "auto":
        return configured
    matching = [name for name, tag in TAGS.items() if tag in template]
    if not matching and '"parameters":' in template:  # Llama 3.2 has no tag
        matching = ["llama3"]
    return matching[0] if matching else None
