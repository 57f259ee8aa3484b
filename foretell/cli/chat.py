"""foretell chat: a conversation in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretell.errors import CapacityError, RequestError

from .common import Command, add_engine_arguments, add_sampling_arguments, check_sampling, load_llm, sampling_params
from .stream_output import StreamStats, print_summary, stream_renderer

if TYPE_CHECKING:
    from foretell.llm import LLM
    from foretell.sampling_params import SamplingParams
    from foretell.types import Delta


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--show",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="colour each token by its drafter, on a terminal with colours",
    )
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_sampling(args)
    llm = load_llm(args)
    params = sampling_params(args, llm)
    if not llm.tokenizer.chat_template:
        raise RequestError("model", "has no chat template; use 'foretell generate --raw' with it")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    while (line := _ask()) is not None:
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages = _turn(llm, params, messages, line, args.show)
    return 0


def _ask() -> str | None:
    """Read the next line; None at the end of input. Ctrl-C only clears the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _turn(
    llm: LLM, params: SamplingParams, messages: list[dict[str, str]], line: str, show: bool
) -> list[dict[str, str]]:
    """Run one turn; a refused message leaves the conversation unchanged."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        answer = _answer(llm, params, asked, show)
    except (RequestError, CapacityError) as error:
        hint = " (/reset starts a new conversation)" if messages else ""
        print(f"foretell: {error}{hint}", file=sys.stderr)
        return messages
    return [*asked, {"role": "assistant", "content": answer}] if answer else messages


def _answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]], show: bool) -> str:
    """Stream an answer; Ctrl-C stops it and keeps the text so far."""
    prompt = llm.tokenizer.encode_chat(messages)
    stats, renderer = StreamStats(), stream_renderer(llm, prompt, show, skip_special=params.skip_special_tokens)
    stream: Iterator[Delta] = iter(())
    try:
        with _ctrl_c() as pressed:
            stream = llm.stream(prompt, params)
            for delta in stream:
                stats.add(delta)
                print(renderer.render(delta), end="", flush=True)
                if pressed and delta.finish_reason is None:
                    print(" [stopped]", end="")
                    break
    finally:
        if isinstance(stream, Generator):
            stream.close()
    print()
    print_summary(stats, renderer)
    return stats.text


@contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """Collect SIGINTs in a list instead of raising: an exception in the middle of a step can get lost."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


CHAT = Command(
    "chat in the terminal; Ctrl-C stops an answer, /reset starts a new conversation, /exit or Ctrl-D quits",
    add_arguments,
    run,
)
