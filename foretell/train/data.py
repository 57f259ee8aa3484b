"""Training data as people have it: chats, prompts, instructions or running text, in files, folders or a pipe."""

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
TEXT, LINES, LIST = (".txt", ".md"), (".jsonl", ".ndjson"), (".json",)
KNOWN = "messages, conversations, prompt, instruction, question or text"
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's words
USABLE = 0.5  # of a file's lines must be usable, or it is some other file


@dataclass(frozen=True)
class TrainPrompt:
    """What the target is asked: a chat, or a text to go on from."""

    messages: tuple[Mapping[str, Any], ...] = ()
    text: str = ""
    tokens: tuple[int, ...] = ()  # the same, in the target's own
    answer_tokens: tuple[int, ...] = ()  # what the target has said to that already, as tokens
    tools: tuple[Mapping[str, Any], ...] = ()
    is_document: bool = False  # whether `text` is read as it stands and not answered
    request: Mapping[str, Any] | None = None  # a chat as a server logged it, to be rendered as the server does

    @property
    def key(self) -> str:
        said = [self.messages, self.text, self.tokens, self.tools, self.request]
        return json.dumps(said, sort_keys=True, default=str)


def load_prompts(path: str) -> list[TrainPrompt]:
    """Everything usable in a file, a folder's files or, for "-", standard input; each ask once."""
    found = list(_stdin() if path == "-" else _files(Path(path)))
    asks = list({ask.key: ask for ask in found}.values())
    if not asks:
        raise RequestError("data", f"{path} has no usable text; give lines with {KNOWN}, or plain text")
    return asks


def _stdin() -> Iterator[TrainPrompt]:
    text = sys.stdin.read()
    parse = _lines if text.lstrip().startswith("{") else _plain
    yield from parse(text, "standard input")


def _files(path: Path) -> Iterator[TrainPrompt]:
    if not path.exists():
        raise RequestError("data", f"there is no {path}")
    if not path.is_dir():
        yield from _file(path, _ending(path))
        return
    files = [each for each in sorted(path.rglob("*")) if each.is_file() and _ending(each) in (*TEXT, *LINES, *LIST)]
    if not files:
        raise RequestError("data", f"{path} has no .jsonl, .json or .txt file, packed (.gz, .xz) or not")
    for each in files:
        yield from _file(each, _ending(each))


def _ending(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in OPENERS else path.suffix


def _file(path: Path, ending: str) -> Iterator[TrainPrompt]:
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise RequestError("data", f"{path} cannot be read as text: {error}") from None
    parse = _plain if ending in TEXT else _list if ending in LIST and text.lstrip().startswith("[") else _lines
    yield from parse(text, path.name)


def _lines(text: str, name: str) -> Iterator[TrainPrompt]:
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: a line may hold other separators
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise RequestError("data", f"{name}, line {number} is not JSON: {error.msg}") from None
    yield from _usable(rows, name)


def _list(text: str, name: str) -> Iterator[TrainPrompt]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError("data", f"{name} is not JSON: {error.msg}") from None
    yield from _usable(rows, name)


def _plain(text: str, name: str) -> Iterator[TrainPrompt]:
    if text.strip():
        yield TrainPrompt(text=text, is_document=True)


def _usable(rows: Iterable[Any], name: str) -> list[TrainPrompt]:
    """Rows that say something; a file of mostly other rows is refused rather than half read."""
    rows = list(rows)
    asks = [ask for row in rows if isinstance(row, dict) and (ask := parse_row(row)) is not None]
    if len(asks) < USABLE * len(rows):
        raise RequestError("data", f"{name}: only {len(asks)} of {len(rows)} rows have usable text ({KNOWN})")
    return asks


def parse_row(row: Mapping[str, Any]) -> TrainPrompt | None:
    """One row of any known shape; None where there is nothing to ask."""
    if "request" in row and "answers" in row:
        return _served(row)
    row = row["body"] if isinstance(row.get("body"), dict) else row
    if isinstance(tokens := row.get("prompt_token_ids"), list) and all(isinstance(each, int) for each in tokens):
        return TrainPrompt(tokens=tuple(tokens)) if tokens else None
    chat = row.get("messages") or row.get("conversations")
    if isinstance(chat, list):
        return _chat(chat, row.get("tools"))
    if isinstance(row.get("text"), str) and "instruction" not in row:
        return TrainPrompt(text=row["text"], is_document=True) if row["text"].strip() else None
    words = [row.get(name) for name in ("prompt", "instruction", "question", "input")]
    said = "\n\n".join(part.strip() for part in words if isinstance(part, str) and part.strip())
    return TrainPrompt(({"role": "user", "content": said},)) if said else None


def _chat(chat: list[Any], tools: Any = None) -> TrainPrompt | None:
    """Up to the last turn that is not the assistant's: that one the target answers."""
    messages: list[Mapping[str, Any]] = []
    for each in chat:
        if not isinstance(each, dict):
            return None
        role = each.get("role") or each.get("from")
        content = each.get("content", each.get("value"))
        messages.append({**each, "role": ROLES.get(str(role), str(role)), "content": content})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not any(each["content"] for each in messages):
        return None
    return TrainPrompt(tuple(messages), tools=tuple(tools) if isinstance(tools, list) else ())


def _served(row: Mapping[str, Any]) -> TrainPrompt | None:
    """A line of `foretell serve --log-requests`: the answer is the target's own already."""
    request, answers = row["request"], row["answers"]
    tokens = tuple(answers[0].get("token_ids") or ()) if answers else ()
    if not tokens:
        return None
    if row.get("kind") == "chat":
        return TrainPrompt(answer_tokens=tokens, request=request)
    prompt = request.get("prompt")
    return TrainPrompt(text=prompt, answer_tokens=tokens) if isinstance(prompt, str) and prompt else None
