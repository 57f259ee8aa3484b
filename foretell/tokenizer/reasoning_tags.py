"""The tags between which models reason, found in their chat templates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    """The tags before and after reasoning. Whitespace after the first one is not part of the reasoning."""

    start: str
    end: str


THINK = ReasoningTags("<think>", "</think>")
REASONING_TAGS = {
    "gemma4": ReasoningTags("<|channel>thought", "<channel|>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
    "think": THINK,
}


def detect_reasoning(template: str | None) -> str | None:
    """Return the name of the tags that a chat template has; None if it has none."""
    return next((name for name, tags in REASONING_TAGS.items() if tags.end in (template or "")), None)
