"""What becomes of fields that a request body does not declare: the same in every API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foretell.build.engine_builder import Assembly
from foretell.options import very_close
from foretell.server.app import REQUEST_BODIES
from foretell.server.request_model import StrictModel
from foretell.server.service import Service
from tests.server.in_process import run_app

HEADER = "x-foretell-ignored-fields"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ONE: dict[str, Any] = {"options": {"num_predict": 1}, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/api/chat": {"messages": HELLO, **ONE},
    "/api/generate": {"prompt": "Hello", **ONE},
    "/api/show": {"model": "tiny"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/apply-template": {"messages": HELLO},
}
TYPOS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/messages", {"temprature": 1}, "temprature", "temperature"),
    ("/v1/messages", {"max_token": 1}, "max_token", "max_tokens"),
    ("/v1/messages", {"stop_sequence": ["a"]}, "stop_sequence", "stop_sequences"),
    ("/v1/messages", {"context_managment": {}}, "context_managment", "context_management"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_token": 5}}, "thinking.budget_token", "budget_tokens"),
    ("/v1/messages/count_tokens", {"sytem": "a"}, "sytem", "system"),
    ("/v1/responses", {"temprature": 1}, "temprature", "temperature"),
    ("/v1/responses", {"max_output_token": 1}, "max_output_token", "max_output_tokens"),
    ("/v1/responses", {"reasoning": {"efort": "low"}}, "reasoning.efort", "effort"),
    ("/api/chat", {"options": {"temprature": 1}}, "options.temprature", "temperature"),
    ("/api/generate", {"options": {"num_predicted": 1}}, "options.num_predicted", "num_predict"),
    ("/api/generate", {"sufix": "a"}, "sufix", "suffix"),
    ("/completion", {"temprature": 1}, "temprature", "temperature"),
]
# Fields that clients of each API send and that mean nothing here: served, also where unknown ones are refused.
OWN: dict[str, dict[str, Any]] = {
    "/v1/messages": {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": [{}]}},
    "/v1/responses": {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"a": 1}},
    "/api/chat": {"keep_alive": "5m", "options": {"num_ctx": 4096, "num_gqa": 8, "num_predict": 1, "use_mmap": True}},
    "/completion": {"id_slot": 1, "samplers": [], "mirostat": 0, "typical_p": 1.0},
}


def message_of(reply: httpx.Response) -> str:
    error = reply.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def test_every_body_follows_the_policy() -> None:
    assert all(issubclass(body, StrictModel) for body in REQUEST_BODIES.values())
    assert set(BODIES) | {"/infill"} == set(REQUEST_BODIES)


@pytest.mark.parametrize(("path", "fields", "name", "meant"), TYPOS)
def test_a_misspelt_field_is_refused_with_the_right_name(
    assembly: Assembly, path: str, fields: dict[str, Any], name: str, meant: str
) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post(path, json=BODIES[path] | fields)
        assert reply.status_code == 400, reply.text
        assert message_of(reply) == f"{name}: is not known; did you mean {meant!r}?"

    run_app(assembly, play)


@pytest.mark.parametrize("path", BODIES)
def test_any_other_is_ignored_and_named_or_refused(assembly: Assembly, path: str) -> None:
    async def ignore(service: Service, client: httpx.AsyncClient) -> None:
        for number in (3, 20):
            more = {f"zzz{i}": 1 for i in range(number)}
            reply = await client.post(path, json=BODIES[path] | more)
            assert reply.status_code == 200, reply.text
            rest = ["and 12 more"] if number == 20 else []
            assert reply.headers[HEADER].split(", ") == [*list(more)[:8], *rest]
        plain = await client.post(path, json=BODIES[path])
        assert HEADER not in plain.headers
        image = await client.post(path, json=BODIES[path] | {"image_url": "x", "videos": []})
        assert image.status_code == 400 and "image_url: is not supported: this model takes text" in message_of(image)
        drafter = await client.post(path, json=BODIES[path] | {"drafter": "ngram"})
        assert drafter.status_code == 200 or message_of(drafter) == "drafter: is not known; put it into speculative"

    async def refuse(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post(path, json=BODIES[path] | {"zzz": 1})
        assert reply.status_code == 400 and message_of(reply).startswith("zzz: is not known"), reply.text
        assert (await client.post(path, json=BODIES[path])).status_code == 200

    run_app(assembly, ignore)
    run_app(assembly, refuse, strict_fields=True)


@pytest.mark.parametrize("path", OWN)
def test_fields_of_the_api_without_a_meaning_here_are_always_served(assembly: Assembly, path: str) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        reply = await client.post(path, json=BODIES[path] | OWN[path])
        assert reply.status_code == 200, reply.text
        named = {"/v1/messages": "context_management", "/v1/responses": "include", "/api/chat": "options.num_ctx"}
        assert reply.headers.get(HEADER) == named.get(path, "typical_p")

    for strict in (False, True):
        run_app(assembly, play, strict_fields=strict)


def test_an_unknown_field_keeps_its_name_though_a_chat_completion_has_it(assembly: Assembly) -> None:
    """`stop` of a chat completion is `stop_sequences` of Anthropic's; a field `stop` of theirs is none."""

    async def play(service: Service, client: httpx.AsyncClient) -> None:
        for path, name in (("/v1/messages", "stop"), ("/v1/responses", "max_tokens"), ("/api/chat", "temperature")):
            reply = await client.post(path, json=BODIES[path] | {name: 1})
            assert reply.status_code == 400 and message_of(reply).startswith(f"{name}: is not known"), reply.text

    run_app(assembly, play, strict_fields=True)


def test_what_models_and_tools_ignore_is_named_together(assembly: Assembly) -> None:
    async def play(service: Service, client: httpx.AsyncClient) -> None:
        body = {**BODIES["/v1/responses"], "zzz": 1, "prediction": {"content": "a", "yyy": 1}}
        tools = [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}}]
        reply = await client.post("/v1/responses", json=body | {"tools": tools, "stream": True})
        assert reply.headers[HEADER] == "zzz, prediction.yyy, tools.web_search", reply.text

    run_app(assembly, play)


def test_no_field_of_an_api_is_taken_for_another(assembly: Assembly) -> None:
    """A known field is compared to no other; a removed or a client's own one must not look like a typo."""
    others = {
        "/v1/messages": ("top_logprobs", "user", "n", "response_format", "parallel_tool_calls", "anthropic_version"),
        "/v1/responses": ("messages", "stop", "n", "logit_bias", "response_format", "max_completion_tokens"),
        "/api/chat": ("session_id", "chat_id", "features", "tool_choice", "max_tokens", "prompt"),
    }
    for path, names in others.items():
        body = REQUEST_BODIES[path]
        close = [(name, very_close(name, body.model_fields)) for name in names]
        assert all(found is None for _, found in close), close
