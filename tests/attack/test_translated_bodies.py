"""Hostile and malformed bodies of the translated APIs: a 4xx in the shape of that API, never a server error."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly, build_engine
from foretell.config import EngineConfig, SpeculationConfig
from foretell.server.service import Service
from tests.server.in_process import run_app
from tests.server.process import write_server_folder

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "b"}]}],
            },
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "speculative": {"max_draft": 2},
    },
    "/v1/responses": {
        "max_output_tokens": 1,
        "instructions": "a",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "d"},
        ],
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "include": ["x"],
    },
    "/api/chat": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "x", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "options": {"num_predict": 1, "temperature": 0.5, "stop": ["x"], "seed": 1},
        "keep_alive": "5m",
        "think": "low",
        "format": "",
    },
    "/api/generate": {"prompt": "a", "system": "b", "raw": False, "options": {"num_predict": 1}, "context": []},
    "/api/show": {"model": "tiny"},
}
ODD: list[Any] = [None, True, -1, 1e308, "", "\u0000", "x" * 70, [], [[]], {}, {"type": {}}, [None], [{"type": []}]]
NUM_MUTATIONS = 150  # of each body


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    folder = write_server_folder(tmp_path_factory.mktemp("models") / "server")
    return build_engine(EngineConfig(model=str(folder)), SpeculationConfig())


def fields(value: Any) -> list[tuple[Any, Any]]:
    """Return every container of a value with each of its keys."""
    keys: Any = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [field for key in keys for field in fields(value[key])]


def mutated(body: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """Return the body with one value replaced, removed or repeated."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    holder, key = source.choice(fields(copy))
    action = source.random()
    if action < 0.7:
        holder[key] = source.choice(ODD)
    elif action < 0.85:
        del holder[key]
    elif isinstance(holder, list):
        holder *= 3
    return copy


def error_is_well_formed(path: str, body: Any) -> bool:
    """Return whether an error has the shape of the path's API."""
    if path.startswith("/api/"):
        return isinstance(body["error"], str) and bool(body["error"])
    if path == "/v1/messages":
        return body["type"] == "error" and body["error"]["type"].endswith("_error") and bool(body["error"]["message"])
    return bool(body["error"]["message"]) and "param" in body["error"]


@pytest.mark.parametrize("path", VALID)
def test_no_mutation_of_a_body_is_a_server_error(assembly: Assembly, path: str) -> None:
    source = random.Random(path)

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        assert (await client.post(path, json=VALID[path])).status_code == 200
        refused = 0
        for _ in range(NUM_MUTATIONS):
            body = mutated(VALID[path], source)
            reply = await client.post(path, json=body)
            assert reply.status_code in (200, 400, 404), (body, reply.text)
            if reply.status_code != 200:
                refused += 1
                assert error_is_well_formed(path, reply.json()), (body, reply.text)
        assert refused > 0 or path == "/api/show"

    run_app(assembly, play, served_model_name=("tiny",))


@pytest.mark.parametrize("path", [path for path in VALID if path != "/api/show"])
def test_a_full_queue_is_reported_in_the_same_shape(assembly: Assembly, path: str) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        service.num_preprocessing = service.engine.max_sequences
        reply = await client.post(path, json=VALID[path])
        assert reply.status_code == 429 and "retry-after" in reply.headers
        assert error_is_well_formed(path, reply.json())
        service.num_preprocessing = 0

    run_app(assembly, play, served_model_name=("tiny",))
