"""How a prompt begins, as a few digests: prompts that begin alike have their first marks in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

STEP = 64  # characters between two marks, about a page of the cache; further in they lie further apart
GROWTH = 16  # the next mark is at least a sixteenth of the way further, so that a long prompt has a hundred or two
SIZE = 12  # bytes of a mark
WRITING = ("/v1/chat/completions", "/v1/completions")


def marks_of(path: str, key: str, body: bytes) -> tuple[bytes, ...]:
    """The marks of a request, the shortest beginning first; none where it writes nothing or cannot be read.

    Callers with another key or salt share no cache, and so no marks.
    """
    if path not in WRITING:
        return ()
    try:
        asked = json.loads(body)
        if not isinstance(asked, dict):
            return ()
        return tuple(_marks(f"{key}\0{asked.get('cache_salt') or ''}", _text(asked)))
    except (ValueError, RecursionError):
        return ()  # the replica reports what is wrong with it


def _marks(tenant: str, text: str) -> Iterator[bytes]:
    digest = hashlib.sha256(tenant.encode(errors="surrogatepass"))
    begin, end = 0, STEP
    while end <= len(text):
        digest.update(text[begin:end].encode(errors="surrogatepass"))
        yield digest.digest()[:SIZE]
        begin, end = end, end + max(STEP, end // GROWTH)


def _text(asked: dict[str, Any]) -> str:
    """What the prompt is made of, in the order in which templates write it."""
    messages = asked.get("messages")
    if not isinstance(messages, list):
        return _prompt(asked.get("prompt"))
    before = [asked.get(name) for name in ("tools", "chat_template_kwargs") if asked.get(name)]
    return "".join(json.dumps(part, sort_keys=True) for part in [*before, *messages])


def _prompt(prompt: Any) -> str:
    """Of several prompts the first decides."""
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    return " ".join(str(token) for token in prompt) if isinstance(prompt, list) else ""
