"""Finds the text that a request asks to rewrite, to draft from it as from OpenAI's `prediction`.

Editors do not send a prediction; their prompts have known formats. Only these count: elsewhere a wrong prediction would
take the place of better drafts.
"""

from __future__ import annotations

import re

MIN_CHARS = 80  # of a text that is worth an index of its own; the suffix drafter copies shorter ones as well
CURSORS = ("<|user_cursor_is_here|>", "<|cursor|>")  # marks of the cursor, which the output leaves out
# Tags around the text, and whether the output repeats them: Zed's edit predictions, rewrite prompts, Zed's assistant.
TAGS = (
    ("<|editable_region_start|>", "<|editable_region_end|>", True),
    ("<code>", "</code>", True),
    ("<rewrite_this>", "</rewrite_this>", False),
)
# Sweep's next edits: sections of a file by state, of which the last is to be written.
FILE, CURRENT, UPDATED = "<|file_sep|>", "<|file_sep|>current/", "<|file_sep|>updated/"
FENCE = "```"
WHOLE = re.compile(
    r"\b(?:whole|entire|full|complete|updated|edited|modified)\s+(?:file|code|program|text|document)\b", re.IGNORECASE
)
REWRITE = re.compile(
    r"\b(?:rewrite|refactor|edit|modify|update|change|rename|fix|add|remove|put|replace|translate)\b", re.IGNORECASE
)
MAX_INSTRUCTION = 2000  # characters outside the text in which the request for a rewrite is looked for


def infer_prediction(text: str) -> str | None:
    """Return what the output probably repeats of a prompt, or of its last message; None if nothing says so."""
    found = _sweep(text) or _tagged(text) or _fenced(text)
    if found is None or len(found) < MIN_CHARS:
        return None
    for cursor in CURSORS:
        found = found.replace(cursor, "")
    return found


def _sweep(text: str) -> str | None:
    """Return the current state of the file whose updated state the prompt ends with."""
    current, updated = text.rfind(CURRENT), text.rfind(UPDATED)
    if not 0 <= current < updated or text.find(FILE, updated + 1) >= 0:
        return None
    section = text[current : text.find(FILE, current + 1)]
    return section.partition("\n")[2] or None


def _tagged(text: str) -> str | None:
    """Return the last text between tags; one in the middle of an explanation of the format has no line break."""
    for start_tag, end_tag, is_repeated in TAGS:
        end = text.rfind(end_tag)
        start = text.rfind(start_tag, 0, end) if end > 0 else -1
        if start < 0:
            continue
        inner = text[start + len(start_tag) : end]
        if start_tag == "<code>" and not _asks_for_rewrite(text[:start], text[end:]):
            continue
        if "\n" in inner:
            return start_tag + inner + end_tag if is_repeated else inner.lstrip("\n")
    return None


def _fenced(text: str) -> str | None:
    """Return the only fenced block, with its fences, where the rest asks for all of it with a change."""
    if text.count(FENCE) != 2:
        return None
    start, end = text.find(FENCE), text.rfind(FENCE)
    before, after = text[:start][-MAX_INSTRUCTION:], text[end:][:MAX_INSTRUCTION]
    asks = _asks_for_rewrite(before, after) and (WHOLE.search(before) or WHOLE.search(after))
    return text[start : end + len(FENCE)] if asks else None


def _asks_for_rewrite(before: str, after: str) -> bool:
    return bool(REWRITE.search(before[-MAX_INSTRUCTION:]) or REWRITE.search(after[:MAX_INSTRUCTION]))
