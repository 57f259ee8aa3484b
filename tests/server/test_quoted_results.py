"""Results of tools in the spelling of a call's arguments: found, bounded, and without effect on outputs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.server.openai.chat_requests import ChatCompletionRequest, ChatMessageParam
from foretell.server.parsers.tools import TOOL_PARSERS
from foretell.server.preprocess import ClientContext
from foretell.server.quoted_results import JSON_PARSERS, MAX_CHARS, quoted_results, without_line_numbers
from foretell.server.service import Service
from foretell.types import Request
from tests.server.in_process import run_app

CODE = 'def add(a, b):\n    """Add «two» numbers."""\n    return a + b\n'
ESCAPED = json.dumps(CODE, ensure_ascii=False)[1:-1]
NUMBERED = "".join(f"{i:6}\u2192{line}\n" for i, line in enumerate(CODE.splitlines(), 1))
TOOL: Any = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}
JSON_PARSER, OTHER_PARSER = "hermes", "qwen3_coder"


def results(*texts: Any, role: str = "tool") -> list[ChatMessageParam]:
    return [ChatMessageParam.model_validate({"role": role, "content": text}) for text in texts]


def test_results_are_spelled_as_a_call_has_them() -> None:
    assert quoted_results(results(CODE), JSON_PARSER) == ESCAPED
    assert quoted_results(results([{"type": "text", "text": CODE}]), JSON_PARSER) == ESCAPED
    assert quoted_results(results(NUMBERED), JSON_PARSER) == f"{CODE}\n{ESCAPED}"
    assert quoted_results(results(NUMBERED), OTHER_PARSER) == CODE, "its arguments are not JSON"


@pytest.mark.parametrize("text", ["", "done", "42 files", None, "a «b» c"])
def test_what_the_prompt_has_in_this_spelling_is_left_out(text: str | None) -> None:
    assert quoted_results(results(text), JSON_PARSER) is None
    assert (
        quoted_results(results(CODE), OTHER_PARSER) is quoted_results(results(CODE, role="user"), JSON_PARSER) is None
    )


def test_line_numbers_of_several_tools_are_recognized() -> None:
    lines = ["import os", "", "os.getcwd()"]
    for form in ("{:6}\t{}", "{:6}\u2192{}", "{}: {}", "{:>4} | {}", "{}|{}"):
        assert without_line_numbers("\n".join(form.format(i, line) for i, line in enumerate(lines, 9))) == "\n".join(
            lines
        )
    for text in ("1 apple\n2 pears", "3: three\nfour\nfive", "", "\n\n", "2024-01-02 10:00: started\nmore"):
        assert without_line_numbers(text) == text


def test_the_latest_results_count_up_to_a_length() -> None:
    texts = [f'"{number}"' + "x" * 10_000 for number in range(6)]
    found = quoted_results(results(*texts), JSON_PARSER) or ""
    assert [f'\\"{number}\\"' in found for number in range(6)] == [False, False, True, True, True, True]
    assert found.index('\\"2\\"') < found.index('\\"5\\"')
    hostile = results("1:" * 500_000, "\n" * 500_000, " " * 500_000, '"\\' * 500_000)
    assert len(quoted_results(hostile, JSON_PARSER) or "") <= 2 * MAX_CHARS + 100
    assert set(JSON_PARSERS) < set(TOOL_PARSERS)


def history(text: str) -> list[Any]:
    call = {"id": "c", "type": "function", "function": {"name": "edit", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Edit it"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": text},
    ]


async def built(service: Service, **fields: Any) -> Request:
    chat = ChatCompletionRequest.model_validate({"messages": history(CODE), "max_tokens": 4, **fields})
    job = await service.run_in_worker(service.preprocessor.preprocess_chat, chat, ClientContext("a", ""))
    return job.requests[0]


def test_requests_with_tools_have_a_reference_and_the_same_output(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        request = await built(service, tools=[TOOL])
        assert assembly.tokenizer.decode(request.reference) == ESCAPED
        for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "speculative": False}):
            assert (await built(service, **fields)).reference == ()
        asked = {"messages": history(CODE), "tools": [TOOL], "max_tokens": 32, "temperature": 0}
        replies = [
            (await client.post("/v1/chat/completions", json={**asked, "speculative": on})).json()
            for on in (True, False)
        ]
        assert replies[0]["choices"] == replies[1]["choices"]

    async def off(service: Service, client: httpx.AsyncClient) -> None:
        assert (await built(service, tools=[TOOL])).reference == ()

    run_app(assembly, play)
    run_app(assembly, off, infer_prediction=False)
