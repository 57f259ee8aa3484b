"""Loading of training prompts: chats, prompts, instructions or plain text, from files, folders or standard input."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import RequestError

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
TEXT_SUFFIXES = (".txt", ".md")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (".json",)
KNOWN_KEYS = "messages, conversations, prompt, instruction, question or text"
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
MIN_USABLE = 0.5  # fraction of a file's rows that must be usable; otherwise the file is refused


@dataclass(frozen=True)
class TrainPrompt:
    """A prompt for the target: a chat, a text or token ids; some come with the target's answer."""

    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    tokens: tuple[int, ...] = ()  # the prompt in the target's token ids
    answer_tokens: tuple[int, ...] = ()  # the target's own answer, if it was logged
    tools: tuple[Mapping[str, Any], ...] = ()
    is_document: bool = False  # train on `text` itself instead of generating an answer
    request: Mapping[str, Any] | None = None  # a chat request from a server's log, to be rendered as the server does

    @property
    def key(self) -> str:
        """Return a key for deduplication."""
        content = [self.messages, self.text, self.tokens, self.tools, self.request]
        return json.dumps(content, sort_keys=True, default=str)


def load_prompts(path: str) -> list[TrainPrompt]:
    """Load and deduplicate the prompts of a file, of a folder's files or, for "-", of standard input."""
    found = list(_stdin() if path == "-" else _files(Path(path)))
    prompts = list({prompt.key: prompt for prompt in found}.values())
    if not prompts:
        raise RequestError("data", f"{path} has no usable text; give rows with {KNOWN_KEYS}, or plain text")
    return prompts


def _stdin() -> Iterator[TrainPrompt]:
    text = sys.stdin.read()
    parse = _parse_jsonl if text.lstrip().startswith("{") else _parse_plain
    yield from parse(text, "standard input")


def _files(path: Path) -> Iterator[TrainPrompt]:
    if not path.exists():
        raise RequestError("data", f"there is no {path}")
    if not path.is_dir():
        yield from _file(path, _suffix(path))
        return
    suffixes = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, *JSON_SUFFIXES)
    files = [each for each in sorted(path.rglob("*")) if each.is_file() and _suffix(each) in suffixes]
    if not files:
        raise RequestError("data", f"{path} has no .jsonl, .json or .txt file, compressed (.gz, .xz) or not")
    for each in files:
        yield from _file(each, _suffix(each))


def _suffix(path: Path) -> str:
    """Return the suffix below that of the compression."""
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


def _file(path: Path, suffix: str) -> Iterator[TrainPrompt]:
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise RequestError("data", f"{path} cannot be read as text: {error}") from None
    if suffix in TEXT_SUFFIXES:
        yield from _parse_plain(text, path.name)
    elif suffix in JSON_SUFFIXES and text.lstrip().startswith("["):
        yield from _parse_json_list(text, path.name)
    else:
        yield from _parse_jsonl(text, path.name)


def _parse_jsonl(text: str, name: str) -> Iterator[TrainPrompt]:
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON may contain other separators
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise RequestError("data", f"{name}, line {number} is not JSON: {error.msg}") from None
    yield from _usable(rows, name)


def _parse_json_list(text: str, name: str) -> Iterator[TrainPrompt]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError("data", f"{name} is not JSON: {error.msg}") from None
    yield from _usable(rows, name)


def _parse_plain(text: str, name: str) -> Iterator[TrainPrompt]:
    if text.strip():
        yield TrainPrompt(text=text, is_document=True)


def _usable(rows: Iterable[Any], name: str) -> list[TrainPrompt]:
    """Return the usable rows; refuse a file in which most rows are not."""
    rows = list(rows)
    prompts = [prompt for row in rows if isinstance(row, dict) and (prompt := parse_row(row)) is not None]
    if len(prompts) < MIN_USABLE * len(rows):
        raise RequestError("data", f"{name}: only {len(prompts)} of {len(rows)} rows have usable text ({KNOWN_KEYS})")
    return prompts


def parse_row(row: Mapping[str, Any]) -> TrainPrompt | None:
    """Parse a row of any known schema; return None if it has no prompt."""
    if "request" in row and "answers" in row:
        return _parse_logged(row)
    row = row["body"] if isinstance(row.get("body"), dict) else row
    if isinstance(tokens := row.get("prompt_token_ids"), list) and all(isinstance(each, int) for each in tokens):
        return TrainPrompt(tokens=tuple(tokens)) if tokens else None
    chat = row.get("messages") or row.get("conversations")
    if isinstance(chat, list):
        return _parse_chat(chat, row.get("tools"))
    if isinstance(row.get("text"), str) and "instruction" not in row:
        return TrainPrompt(text=row["text"], is_document=True) if row["text"].strip() else None
    parts = [row.get(name) for name in ("prompt", "instruction", "question", "input")]
    content = "\n\n".join(part.strip() for part in parts if isinstance(part, str) and part.strip())
    return TrainPrompt(({"role": "user", "content": content},)) if content else None


def _parse_chat(chat: list[Any], tools: Any = None) -> TrainPrompt | None:
    """Return the chat without trailing assistant turns, which the target generates."""
    messages: list[Mapping[str, Any]] = []
    for each in chat:
        if not isinstance(each, dict):
            return None
        role = each.get("role") or each.get("from")
        content = each.get("content", each.get("value"))
        messages.append({**each, "role": SHAREGPT_ROLES.get(str(role), str(role)), "content": content})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not any(each["content"] for each in messages):
        return None
    return TrainPrompt(tuple(messages), tools=tuple(tools) if isinstance(tools, list) else ())


def _parse_logged(row: Mapping[str, Any]) -> TrainPrompt | None:
    """Parse a line of `foretell serve --log-requests`, whose answer is the target's own."""
    request, answers = row["request"], row["answers"]
    tokens = tuple(answers[0].get("token_ids") or ()) if answers else ()
    if not tokens:
        return None
    if row.get("kind") == "chat":
        return TrainPrompt(answer_tokens=tokens, request=request)
    prompt = request.get("prompt")
    return TrainPrompt(text=prompt, answer_tokens=tokens) if isinstance(prompt, str) and prompt else None
