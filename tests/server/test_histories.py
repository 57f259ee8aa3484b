"""Histories with output of other models and results that are not text: placeholders keep the conversation alive."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.errors import RequestError
from foretell.server.anthropic.requests import MessagesRequest
from foretell.server.chat_template import apply_chat_template
from foretell.server.openai.chat_requests import ChatCompletionRequest
from foretell.server.openai_responses.requests import ResponsesRequest
from foretell.server.service import Service
from tests.server.in_process import run_app

HELLO = {"role": "user", "content": "Hello"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
DATA = {"url": "data:image/png;base64,aGk="}


def anthropic(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    chat = MessagesRequest.model_validate({"messages": [HELLO, *messages]}).to_chat(reasons=True)
    return [message.model_dump(exclude_none=True) for message in chat.messages[1:]]


def responses(*items: dict[str, Any]) -> list[dict[str, Any]]:
    chat = ResponsesRequest.model_validate({"input": [HELLO, *items]}).to_chat([])
    return [message.model_dump(exclude_none=True) for message in chat.messages[1:]]


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content, **more}]}


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("content", "more", "text"),
    [
        ([{"type": "text", "text": "seen"}, IMAGE], {}, "seen\n\n[image omitted]"),
        ([{"type": "search_result", "content": [{"type": "text", "text": "found"}]}], {}, "found"),
        ([{"type": "tool_reference", "tool_name": "f"}], {}, "[tool_reference omitted]"),
        ([{"type": "a b\n" * 50}], {}, "[" + ("a_b_" * 50)[:64] + " omitted]"),
        ([{"type": "text"}], {}, "[text omitted]"),
        (None, {}, ""),
        ("no such file", {"is_error": True}, "Error: no such file"),
        ([{"type": "text", "text": "error: no"}], {"is_error": True}, "error: no"),
        (None, {"is_error": True}, "Error: "),
        ("fine", {"is_error": False}, "fine"),
    ],
)
def test_results_of_anthropics_tools(content: Any, more: dict[str, Any], text: str) -> None:
    assert anthropic(result(content, **more)) == [{"role": "tool", "tool_call_id": "t", "content": text}]


def test_blocks_of_anthropics_servers_in_earlier_messages() -> None:
    blocks = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "redacted_thinking", "data": "?"},
        {"type": "text", "text": "Found."},
    ]
    text = "I search.\n\n[server_tool_use omitted]\n\n[web_search_tool_result omitted]\n\nFound."
    assert anthropic({"role": "assistant", "content": blocks}) == [{"role": "assistant", "content": text}]
    assert anthropic({"role": "assistant", "content": None}) == [{"role": "assistant", "content": ""}]
    for role in ("user", "system"):
        with pytest.raises(RequestError, match=r"messages\.1\.content: must be a string"):
            anthropic({"role": role, "content": None})
    with pytest.raises(RequestError, match=r"messages\.1\.content\.0: is of type image"):
        anthropic({"role": "user", "content": [IMAGE]})
    with pytest.raises(RequestError, match=r"messages\.1\.content\.0\.content: must be"):
        anthropic(result([5]))


def test_items_of_openais_tools() -> None:
    found = responses(
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c", "output": None},
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "u"}]},
        {"type": "message", "role": "assistant", "content": None},
        {"type": "mcp_list_tools", "server_label": "m", "tools": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "output_audio"}]},
    )
    empty: dict[str, Any] = {"role": "assistant", "content": ""}
    output = {"role": "tool", "tool_call_id": "c"}
    assert found == [
        {
            "role": "assistant",
            "content": "[web_search_call omitted]",
            "tool_calls": [call("apply_patch", '{"input": "*** Begin"}')],
        },
        {**output, "content": "done"},
        {**empty, "tool_calls": [call("local_shell", '{"command": ["ls"]}')]},
        {**output, "content": ""},
        {**empty, "tool_calls": [call("view", "{}")]},
        {**output, "content": "[input_image omitted]"},
        {"role": "assistant", "content": "[mcp_list_tools omitted]"},
        {"role": "assistant", "content": "No.[output_audio omitted]"},
    ]


@pytest.mark.parametrize(
    ("item", "error"),
    [
        ({"role": "assistant", "content": 5}, r"input\.1\.content: must be"),
        ({"type": "function_call_output", "call_id": "c", "output": [5]}, r"input\.1\.output: must be"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, r"input\.1\.input: must be a string"),
        ({"role": "user", "content": None}, r"input\.1\.content: must be"),
        ({"role": "user", "content": [{"type": "input_image"}]}, r"input\.1\.content\.0: is an image"),
        ({"type": "unheard_of"}, r"input\.1: has the type 'unheard_of'"),
    ],
)
def test_items_that_are_still_refused(item: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        responses(item)


def test_chats_with_parts_and_media_of_earlier_output(assembly: Assembly) -> None:
    messages = [
        HELLO,
        {"role": "assistant", "content": None, "audio": {"id": "a"}},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes."}]},
        {"role": "tool", "tool_call_id": "c", "content": "seen", "images": ["aGk="]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": DATA}]},
    ]
    text = apply_chat_template(assembly.tokenizer, ChatCompletionRequest.model_validate({"messages": messages}), None)
    shown = [part.partition("\n")[2].partition("<|im_end|>")[0] for part in text.split("<|im_start|>")[2:-1]]
    assert shown == ["[audio omitted]", "Yes.", "seen[images omitted]", "[image_url omitted]"]


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [HELLO, {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}]}, HELLO]
    },
    "/v1/messages": {"messages": [HELLO, {"role": "assistant", "content": None}, result([IMAGE])], "max_tokens": 1},
    "/v1/responses": {"input": [HELLO, {"type": "web_search_call"}, {"role": "assistant", "content": None}, HELLO]},
}


@pytest.mark.parametrize("path", CONVERSATIONS)
def test_such_a_conversation_goes_on(assembly: Assembly, path: str) -> None:
    limit = {"max_output_tokens": 1} if path == "/v1/responses" else {"max_tokens": 1}

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post(path, json={**CONVERSATIONS[path], **limit})
        assert reply.status_code == 200, reply.text

    run_app(assembly, play)
