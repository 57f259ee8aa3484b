"""Histories of many short messages, results and calls: their translation takes linear time and little memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from foretell.server.anthropic.requests import MessagesRequest
from foretell.server.generic_tools import as_plain_turns
from foretell.server.ollama.requests import OllamaChatRequest
from foretell.server.openai_responses.input_items import chat_messages

FEW, MANY = 4_000, 64_000  # entries; a body of 4 MiB has room for twice as many of the shortest
FACTOR = MANY // FEW
TEXT = "the text of a result"
USER = {"role": "user", "content": "a"}


def results(count: int) -> Any:
    return as_plain_turns([{"role": "tool", "content": TEXT}] * count)


def anthropic(blocks: list[Any]) -> Any:
    return MessagesRequest.model_validate({"messages": [{"role": "user", "content": blocks}]})._messages()


def text_blocks(count: int) -> Any:
    return anthropic([{"type": "text", "text": TEXT}] * count)


def result_blocks(count: int) -> Any:
    return anthropic([{"type": "tool_result", "tool_use_id": "t", "content": TEXT}] * count)


def function_calls(count: int) -> Any:
    return chat_messages([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * count)


def reasoning(count: int) -> Any:
    return chat_messages([{"type": "reasoning", "summary": [{"type": "summary_text", "text": TEXT}]}] * count)


def ollama_results(count: int) -> Any:
    call = {"function": {"name": "f", "arguments": {}}}
    answers = [{"role": "tool", "content": TEXT}] * count
    messages = [USER, {"role": "assistant", "tool_calls": [call] * count}, *answers]
    return OllamaChatRequest.model_validate({"messages": messages})._messages()


HISTORIES = (results, text_blocks, result_blocks, function_calls, reasoning, ollama_results)


def seconds(translate: Callable[[int], Any], count: int) -> float:
    """Return the shortest of three times on the processor, which other processes disturb least."""
    found = []
    for _ in range(3):
        began = time.thread_time()
        translate(count)
        found.append(time.thread_time() - began)
    return min(found)


@pytest.mark.parametrize("translate", HISTORIES)
def test_the_time_is_linear(translate: Callable[[int], Any]) -> None:
    gc.disable()  # it runs more often, and longer, the more objects there are
    try:
        ratio = seconds(translate, MANY) / seconds(translate, FEW)
    finally:
        gc.enable()
    assert ratio < 6 * FACTOR, "quadratic time has 16 times the factor"


@pytest.mark.parametrize("translate", HISTORIES)
def test_the_memory_is_linear(translate: Callable[[int], Any]) -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        translate(count)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    many = MANY // 4  # tracing takes most of the time
    assert peak(many) < 2 * many // FEW * peak(FEW) and peak(many) < many * 4000
