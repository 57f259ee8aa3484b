"""Schemathesis on the OpenAPI schema: every response matches its description."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.engine.request_builder import RULES as ENGINE_RULES
from foretell.server.app import REQUEST_BODIES
from foretell.server.json_schemas import RULES, WORKLOADS
from foretell.verify.lossy import WORKLOADS as PRESETS
from tests.server.agreed_bodies import AGREED, MINIMAL
from tests.server.conftest import KEYS
from tests.server.process import ServerProcess
from tests.waiting import TIMEOUT

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,allow_header_conformance,valid_data_is_accepted"
)
HOOKS = "tests.server.schema_hooks"  # has the last of these checks
ROOT = Path(__file__).parents[2]
SAMPLING = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")


def attack(server: ServerProcess, place: Path, *flags: str) -> None:
    """Run schemathesis; the server must be healthy afterwards."""
    program = str(Path(sys.executable).parent / "schemathesis")
    words = [program, "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--seed", "1", "--no-color", *flags]
    words += ["--request-timeout", str(2 * TIMEOUT)]
    env = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=7200, cwd=place, env=env)
    assert done.returncode == 0, done.stdout[-6000:]
    assert server.http.get("/health").status_code == 200


def test_a_few_requests_of_every_kind(server: ServerProcess, tmp_path: Path) -> None:
    attack(server, tmp_path, "--phases", "fuzzing", "--max-examples", "20")


@pytest.mark.slow
def test_thousands_of_them(server: ServerProcess, tmp_path: Path) -> None:
    attack(server, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "300")


def test_every_endpoint_is_described(server: ServerProcess) -> None:
    described = set(server.http.get("/openapi.json").json()["paths"])
    assert described >= {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/health", "/ready",
        "/metrics", "/version", "/server_info", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
        "/v1/responses/{response_id}", "/v1/responses/input_tokens", "/api/chat", "/api/generate", "/api/show",
        "/api/tags", "/api/ps", "/api/version",
    }  # fmt: skip


def test_what_can_be_streamed_is_described_as_a_stream_too(server: ServerProcess) -> None:
    schema = server.http.get("/openapi.json").json()
    streamed = 0
    for path, methods in schema["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        name = "" if body is None else body["schema"].get("$ref", "").rpartition("/")[2]
        if name and "stream" in schema["components"]["schemas"][name]["properties"]:
            kinds = methods["post"]["responses"]["200"]["content"].keys()
            assert kinds in ({"application/json", "text/event-stream"}, {"application/json", "application/x-ndjson"}), (
                path
            )
            streamed += 1
    assert streamed >= 7


def test_the_described_ranges_are_those_that_are_checked(server: ServerProcess) -> None:
    fields = server.http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    for name in (*SAMPLING, "repetition_penalty"):
        low, high, above = (fields[name].get(limit) for limit in ("minimum", "maximum", "exclusiveMinimum"))
        served = {1e4 if high is None else high, above + 1e-4 if low is None else low}
        refused = {above if low is None else low - 0.1, *(() if high is None else [high + 0.1])}
        for value in (*served, *refused):
            reply = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, name: value})
            assert reply.status_code == (200 if value in served else 400), (name, value)


def test_a_prediction_has_text_parts_as_described(server: ServerProcess) -> None:
    parts = {400: [{"text": "a"}, {"type": "text"}], 200: [{"type": "text", "text": "a"}]}
    for status, each in ((status, part) for status, found in parts.items() for part in found):
        prediction = {"type": "content", "content": [each]}
        body = {"prompt": "a", "max_tokens": 1, "prediction": prediction}
        assert server.http.post("/v1/completions", json=body).status_code == status, each


def test_events_are_described_one_by_one(server: ServerProcess) -> None:
    """A schema of the whole stream is read as that of each event by tools for OpenAPI before 3.2."""
    paths = server.http.get("/openapi.json").json()["paths"]
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }
    for path, body in bodies.items():
        described = paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        assert "schema" not in described
        lines = server.http.post(path, json={**body, "stream": True, "max_tokens": 3}).text.split("\n\n")[:-1]
        assert len(lines) > 1
        for line in lines:
            jsonschema.validate({"event": "message", "data": line.removeprefix("data: ")}, described["itemSchema"])


def test_every_field_and_type_has_a_description(server: ServerProcess) -> None:
    api = server.http.get("/openapi.json").json()
    schemas = api["components"]["schemas"]
    fields = [  # a bare $ref is no description: pydantic leaves out one that equals that of the type
        (f"{name}.{field}", described)
        for name, schema in schemas.items()
        for field, described in schema.get("properties", {}).items()
    ]
    types = list(schemas.items())
    operations = [(path, call) for path, methods in api["paths"].items() for call in methods.values()]
    parameters = [(path, each) for path, call in operations for each in call.get("parameters", ())]
    assert len(fields) > 200 and len(types) > 30 and parameters
    missing = [name for name, each in fields + types + operations + parameters if not each.get("description")]
    assert missing == []


def test_required_fields_come_first_and_those_without_effect_last(server: ServerProcess) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    for name, first in {"ChatCompletionRequest": "messages", "CompletionRequest": "prompt"}.items():
        properties = schemas[name]["properties"]
        assert next(iter(properties)) == first
        without_effect = ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"]
        without_effect += ["prompt_cache_retention", "request_id", "priority", "verbosity"]
        assert list(properties)[-len(without_effect) :] == without_effect
        for field in without_effect:
            assert properties[field]["description"].startswith("Accepted without effect.")


def test_the_examples_of_the_docs_work(server: ServerProcess) -> None:
    examples = re.findall(r"<pre>(.*?)</pre>", server.http.get("/docs").text, re.S)
    assert len(examples) >= 11
    commands = [shlex.split(html.unescape(example)) for example in examples]
    stored = server.post("/v1/responses", input="a", max_output_tokens=1)["id"]
    for words in commands:
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        path, body = words[1].removeprefix("http://127.0.0.1:8000"), words[-1] if "-d" in words else ""
        if body:
            given = json.loads(html.unescape(body)) | ({"max_tokens": 4} if "completions" in path else {})
            if path == "/detokenize":
                given = {"tokens": [1, 2, 3]}  # the tiny model has fewer tokens
            reply = server.http.post(path, json=given)
            assert reply.status_code == 200 or (path == "/infill" and "fill-in-the-middle" in reply.text), path
        else:
            path = path.replace("NAME", "tiny").replace("RESPONSE_ID", stored)
            assert server.http.request(method, path).status_code == 200, path


def test_server_info_is_described(server: ServerProcess) -> None:
    api = server.http.get("/openapi.json").json()
    schema = {**api["components"]["schemas"]["ServerInfo"], "components": api["components"]}
    info = server.http.get("/server_info").json()
    jsonschema.validate(info, schema)
    assert set(info) == set(schema["properties"])


@pytest.mark.parametrize("path", AGREED)
def test_the_schema_is_as_strict_as_the_checks(server: ServerProcess, path: str) -> None:
    api = server.http.get("/openapi.json").json()
    schema = {**api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]}
    validator = jsonschema.Draft202012Validator({**schema, "components": api["components"]})
    for fields, accepted in AGREED[path]:
        body = MINIMAL[path] | fields
        reply = server.http.post(path, json=body)
        assert (reply.status_code == 200) == accepted, (body, reply.text)
        assert validator.is_valid(body) == accepted, body


def test_described_names_are_those_that_the_engine_knows() -> None:
    assert set(RULES) == set(ENGINE_RULES) and set(WORKLOADS) == {*PRESETS, "auto"}


def test_every_body_has_agreed_ones() -> None:
    assert {*AGREED, "/infill", "/detokenize", "/api/show"} == {*REQUEST_BODIES}


def test_strict_fields_are_described(strict_server: ServerProcess) -> None:
    schemas = strict_server.http.get("/openapi.json", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    assert schemas["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False
