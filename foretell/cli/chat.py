"""foretell chat: a conversation in the terminal, with a model in this process or on a server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, get_type_hints

from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import ForetellError, RequestError
from foretell.options import given_options, nearest, plain_type
from foretell.sampling_params import SamplingParams

from .chat_backend import ChatBackend, LocalBackend, Messages, ServerBackend
from .chat_input import line_reader
from .common import (
    Command,
    add_engine_arguments,
    add_model_argument,
    add_sampling_arguments,
    check_sampling,
    check_writable,
    load_llm,
    log,
    write_atomic,
)

API_KEY = "FORETELL_API_KEY"
COMMANDS = {
    "/help": "list these commands",
    "/reset": "start a new conversation",
    "/save": "FILE: write the conversation as JSON",
    "/set": "NAME VALUE: change a sampling parameter, such as temperature 0.7",
    "/exit": "leave, as Ctrl-D does",
}
LEAVE = ("/exit", "/quit", "/bye")
HELP = "\n".join(
    [
        *(f"{name:7} {about}" for name, about in COMMANDS.items()),
        "Ctrl-C stops an answer. Alt-Enter starts a new line.",
        "A message that begins with '/' needs a space before it.",
    ]
)
# By option: what to use instead.
REFUSED = {
    "n": "a chat has one answer a turn; use 'foretell generate --n'",
    "logprobs": "are not shown in a chat; use 'foretell generate --json --logprobs'",
    "prompt_logprobs": "are not shown in a chat; use 'foretell generate --json --prompt-logprobs'",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, f"the model (default: {EngineConfig.model}, or with --url the server's)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--url", help="chat with a running server that has OpenAI's API, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help=f"API key of the server (default: {API_KEY} if set)")
    parser.add_argument(
        "--show",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="colour each token by its drafter, on a terminal with colours",
    )
    parser.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the lines of this chat for the next one, in FORETELL_HOME",
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser)
    for action in parser._actions:
        if action.dest in REFUSED:
            action.help = argparse.SUPPRESS


def run(args: argparse.Namespace) -> int:
    for name, reason in REFUSED.items():
        if hasattr(args, name):
            raise RequestError(name, reason)
    check_sampling(args)
    sampling = given_options(args, SamplingParams)
    read = line_reader(COMMANDS, keep_history=args.history)
    line = None if sys.stdin.isatty() else read()  # input that is not text is refused before a model is loaded
    backend = _backend(args)
    conversation = Conversation(backend, args.system, sampling)
    if sys.stdin.isatty():
        log(f"{backend.banner(sampling)}\n/help lists commands, Ctrl-D leaves")
        line = read()
    while line is not None and line.rstrip().partition(" ")[0] not in LEAVE:
        conversation.handle(line)
        line = read()
    return 0


def _backend(args: argparse.Namespace) -> ChatBackend:
    if args.url is None:
        if args.api_key is not None:
            raise RequestError("api_key", "is for a server; name it with --url")
        return LocalBackend(load_llm(args), show=args.show)
    given = given_options(args, EngineConfig) | given_options(args, SpeculationConfig)
    model = given.pop("model", None)
    for name in [*given, *(["speculative_config"] if hasattr(args, "speculative_config") else [])]:
        raise RequestError(name, "is a setting of the server; leave it out with --url")
    return ServerBackend(args.url, args.api_key or os.environ.get(API_KEY) or None, model)


class Conversation:
    """The messages of a chat, and the commands that act on it."""

    def __init__(self, backend: ChatBackend, system: str | None, sampling: dict[str, Any]) -> None:
        self.backend, self.sampling = backend, dict(sampling)
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: Messages = list(self._opening)
        self._saved: set[Path] = set()  # files that this chat wrote and may write again

    def handle(self, line: str) -> None:
        """Run a command or send a message. One that is refused is reported and changes nothing."""
        try:
            if line.startswith("/"):
                self._command(*line.strip().split(maxsplit=1))
            elif line.strip():
                self._send(line.strip())
        except ForetellError as error:
            log(f"foretell: {' '.join(str(error).split())}")

    def _send(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self.backend.answer(asked, self.sampling)
        except ForetellError as error:
            hint = " (/reset starts a new conversation)" if len(self.messages) > len(self._opening) else ""
            raise ForetellError(f"{error}{hint}") from None
        if answer:
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _command(self, name: str, rest: str = "") -> None:
        match name:
            case "/help":
                log(HELP)
            case "/reset":
                self.messages = list(self._opening)
                log("new conversation")
            case "/save":
                self._save(rest)
            case "/set":
                self._set(*rest.split())
            case _:
                raise ForetellError(f"there is no command {name}; known: {', '.join(COMMANDS)}")

    def _save(self, name: str) -> None:
        if not name:
            raise ForetellError("/save needs a file: /save chat.json")
        path = Path(name).expanduser()
        if path.exists() and path.resolve() not in self._saved:
            raise ForetellError(f"/save: {path} exists; name a new file")
        check_writable(path, "/save")
        content = {"model": self.backend.model, "messages": self.messages}
        try:
            write_atomic(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
        except (OSError, UnicodeError) as error:  # a full disk, or a message with half a surrogate pair
            raise ForetellError(f"/save: {path} cannot be written: {error}") from None
        self._saved.add(path.resolve())
        log(f"{len(self.messages)} messages are in {path}")

    def _set(self, name: str = "", *values: str) -> None:
        if name:
            if len(values) != 1:
                raise ForetellError("/set needs a name and a value: /set temperature 0.7")
            self.sampling = parse_setting(self.sampling, name.replace("-", "_"), values[0])
        log(", ".join(f"{name} {value}" for name, value in self.sampling.items()) or "the model's own settings")


def parse_setting(sampling: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    """Return the sampling parameters with one more, given as text."""
    hints = {name: plain_type(hint) for name, hint in get_type_hints(SamplingParams).items() if name not in REFUSED}
    kinds = {name: kind for name, kind in hints.items() if kind in (int, float)}
    if name not in kinds:
        raise RequestError(name, f"cannot be set in a chat; {nearest(name, kinds)}")
    try:
        changed = sampling | {name: kinds[name](value)}
    except ValueError:
        kind = "an integer" if kinds[name] is int else "a number"
        raise RequestError(name, f"must be {kind}, not {value!r}") from None
    SamplingParams(**changed)
    return changed


CHAT = Command(
    "chat in the terminal; Ctrl-C stops an answer, /reset starts a new conversation, /exit or Ctrl-D quits",
    add_arguments,
    run,
)
