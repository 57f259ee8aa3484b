"""The results of tools as a tool call quotes them, which drafts can be copied from.

An edit repeats lines that a tool has returned. In the JSON arguments of a call their line ends and quotes are escaped,
and editors' tools return lines with numbers in front, so that the prompt has the same text in another spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from foretell.server.openai.chat_requests import ChatMessageParam

JSON_PARSERS = ("hermes", "llama3", "mistral", "harmony")  # formats whose calls have JSON arguments
MAX_CHARS = 32 * 1024  # of the latest results; 10,000 tokens of code, which take 7 ms to encode and 5 ms to index
NUMBERED = re.compile(r"^ *\d+(?:→|\t|: | ?\| ?)", re.MULTILINE)  # the number in front of a line, as `cat -n` writes it
NUMBERED_SHARE = 3 / 4  # of the lines from which they count as numbered


def quoted_results(messages: Sequence[ChatMessageParam], tool_parser: str | None) -> str | None:
    """Return the latest results in the spellings that the prompt does not have; None if there are none."""
    found: list[str] = []
    room = MAX_CHARS
    for message in reversed(messages):
        if message.role != "tool" or room <= 0:
            continue
        text = _text(message)[:room]
        spellings = _spellings(text, tool_parser)
        found = spellings + found
        room -= len(text) * len(spellings)
    return "\n".join(found) or None


def _spellings(text: str, tool_parser: str | None) -> list[str]:
    """Return the text without line numbers, and as a JSON string, as far as these differ from what the prompt has."""
    plain = without_line_numbers(text)
    escaped = json.dumps(plain, ensure_ascii=False)[1:-1] if tool_parser in JSON_PARSERS else plain
    return [each for each in dict.fromkeys((plain, escaped)) if each != text]


def without_line_numbers(text: str) -> str:
    """Return a text without the numbers in front of its lines, if most of them have one."""
    numbered, lines = len(NUMBERED.findall(text)), text.rstrip("\n").count("\n") + 1
    return NUMBERED.sub("", text) if numbered >= lines * NUMBERED_SHARE else text


def _text(message: ChatMessageParam) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(str(part.get("text") or "") for part in message.content or ())
