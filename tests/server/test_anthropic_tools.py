"""Anthropic's own tools: those of its servers are left out by name, those that a client runs get a schema."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.errors import RequestError
from foretell.server.anthropic.requests import MessagesRequest
from foretell.server.service import Service
from tests.server.in_process import run_app

HELLO = [{"role": "user", "content": "Hello"}]
LONG = "mcp__" + "x" * 123
CUSTOM = {"name": LONG, "input_schema": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
TOOLSET = {"type": "mcp_toolset", "mcp_server_name": "m"}
PATH = "/v1/messages"


def functions(*tools: dict[str, Any]) -> dict[str, Any]:
    body = MessagesRequest.model_validate({"messages": HELLO, "tools": list(tools)})
    return {tool.function.name: tool.function for tool in body.to_chat(reasons=False).tools or ()}


def test_hosted_tools_are_left_out_and_named(assembly: Assembly) -> None:
    assert list(functions(SEARCH, CUSTOM, TOOLSET)) == [LONG]

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for path in (PATH, f"{PATH}/count_tokens"):
            body = {"messages": HELLO, "max_tokens": 1, "tools": [SEARCH, CUSTOM, TOOLSET]}
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
        reply = await client.post(PATH, json={**body, "tools": [SEARCH]})
        assert reply.headers["x-foretell-ignored-fields"] == "tools.web_search_20250305"
        reply = await client.post(PATH, json={**body, "tools": [SEARCH], "tool_choice": {"type": "any"}})
        assert reply.status_code == 400 and "add some" in reply.json()["error"]["message"]

    run_app(assembly, play)


@pytest.mark.parametrize(
    ("kind", "name", "required"),
    [
        ("bash_20250124", "bash", []),
        ("bash_20241022", "bash", []),
        ("text_editor_20250728", "str_replace_based_edit_tool", ["command", "path"]),
        ("memory_20250818", "memory", ["command"]),
    ],
)
def test_tools_that_the_client_runs_get_a_schema(kind: str, name: str, required: list[str]) -> None:
    for given in ({"type": kind}, {"type": kind, "name": "own"}):
        ((found, function),) = functions(given).items()
        assert found == given.get("name", name) and function.description
        assert function.parameters["required"] == required and "command" in function.parameters["properties"]


def test_a_tool_with_a_schema_is_a_clients() -> None:
    assert list(functions({**CUSTOM, "type": "anything_20990101"})) == [LONG]


@pytest.mark.parametrize(
    ("tool", "error"),
    [
        ({"type": "computer_20250124", "name": "computer"}, r"tools\.0\.type: computer_20250124 returns images"),
        ({"input_schema": {"type": "object"}}, r"tools\.0\.name: is missing"),
        ({"type": "custom"}, r"tools\.0\.name: is missing"),
    ],
)
def test_tools_that_are_refused(tool: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        functions(tool)


def test_a_name_has_at_most_128_characters(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for length, status in ((128, 200), (129, 400)):
            tool = {**CUSTOM, "name": "x" * length}
            reply = await client.post(PATH, json={"messages": HELLO, "max_tokens": 1, "tools": [tool]})
            assert reply.status_code == status, reply.text
            function = {"type": "function", "function": {"name": "x" * length}}
            chat = {"messages": HELLO, "max_tokens": 1, "tools": [function]}
            reply = await client.post("/v1/chat/completions", json=chat)
            assert reply.status_code == status, reply.text

    run_app(assembly, play)
