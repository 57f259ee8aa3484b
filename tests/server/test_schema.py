"""Schemathesis on the OpenAPI schema: every response matches its description."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.server.process import ServerProcess

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,allow_header_conformance"
)


def attack(server: ServerProcess, place: Path, *flags: str) -> None:
    """Run schemathesis; the server must be healthy afterwards."""
    program = str(Path(sys.executable).parent / "schemathesis")
    words = [program, "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--seed", "1", "--no-color", *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, cwd=place)
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
        "/metrics", "/version", "/server_info",
    }  # fmt: skip


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
