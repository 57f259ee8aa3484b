"""A server with keys and small limits: access, limits, and disconnected clients."""

from __future__ import annotations

import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import KEYS
from tests.server.process import CONTEXT, ServerProcess
from tests.waiting import TIMEOUT, wait_for

TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
SLOW: Any = {"prompt": TEXT, "max_tokens": CONTEXT - 100, "ignore_eos": True, "speculative": False, "temperature": 0}
LONG: Any = {"prompt": TEXT, "max_tokens": CONTEXT // 2, "ignore_eos": True}


def ask(server: ServerProcess, key: str | None = KEYS[0], **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 4, **body}, headers=headers)


def wait_until_idle(server: ServerProcess) -> dict[str, float]:
    """Wait until nothing runs; all pages must be free then."""
    found: dict[str, float] = {}

    def rests() -> bool:
        found.update(server.metrics())
        return not found["foretell:num_requests_running"] and not found["foretell:num_requests_waiting"]

    wait_for(rests)
    assert found["foretell:kv_cache_usage_perc"] == 0
    return found


def test_keys(strict_server: ServerProcess) -> None:
    assert all(ask(strict_server, key).status_code == 200 for key in KEYS)
    for wrong in (None, "third-key", KEYS[0] + "x", KEYS[0][:-1], KEYS[0].upper()):
        reply = ask(strict_server, wrong)
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/server_info"):
        assert strict_server.http.get(path).status_code == 401
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert strict_server.http.get(path).status_code == 200
    body = strict_server.http.get("/server_info", headers={"Authorization": f"Bearer {KEYS[0]}"}).text
    assert not any(key in body + strict_server.log.read_text() for key in KEYS), "keys are never shown or logged"


def test_strict_flags_refuse_unknown_fields_and_long_outputs(strict_server: ServerProcess) -> None:
    error = ask(strict_server, zzz=1).json()["error"]
    assert (error["code"], error["message"]) == (
        "unsupported_parameter",
        "zzz: is not known; GET /docs lists the fields",
    )
    error = ask(strict_server, max_tokens=CONTEXT).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert re.match(
        rf"This model's maximum context length is {CONTEXT} tokens. However, you requested \d+ tokens", error["message"]
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 3}, "n"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": ["x" * 300]}, "stop"),
        ({"logprobs": 50}, "logprobs"),
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"guided_json": {"enum": ["x" * 600]}}, "structured_outputs.json_schema"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"prompt": ["a"] * 5}, "n"),
    ],
)
def test_limits(strict_server: ServerProcess, body: dict[str, Any], field: str) -> None:
    reply = ask(strict_server, **body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field


def test_large_bodies_are_rejected_unread(strict_server: ServerProcess) -> None:
    assert ask(strict_server, prompt="x" * 30_000).status_code == 413
    headers = {"Authorization": f"Bearer {KEYS[0]}", "content-type": "application/json"}
    parts = (b" " * 1000 for _ in range(100))  # no length announced
    assert strict_server.http.post("/v1/completions", content=parts, headers=headers).status_code == 413


def test_slow_bodies_are_not_waited_for(strict_server: ServerProcess) -> None:
    host, port = strict_server.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Length: 100\r\n\r\n{{"
    )
    with socket.create_connection((host, int(port)), TIMEOUT) as slow:
        slow.sendall(head.encode())
        assert b" 408 " in slow.recv(4096)


@pytest.mark.parametrize("said", [b"", b"GET /health HT"])
def test_idle_connections_are_closed(strict_server: ServerProcess, said: bytes) -> None:
    host, port = strict_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), TIMEOUT) as silent:
        silent.sendall(said)
        assert silent.recv(4096) == b"", "the other side has hung up"


def test_a_full_queue_returns_retry_after(strict_server: ServerProcess) -> None:
    replies: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(ask(strict_server, **LONG))) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused and all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert {reply.status_code for reply in replies} <= {200, 429}
    wait_until_idle(strict_server)


def test_a_disconnected_client_frees_its_pages(strict_server: ServerProcess) -> None:
    """A streaming client and one that waits for the complete response; generation stops when they disconnect."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}

    def steps() -> float:
        return wait_until_idle(strict_server)["foretell:step_seconds_count"]

    before = steps()
    assert ask(strict_server, **SLOW).status_code == 200
    whole = steps() - before
    with httpx.Client(base_url=strict_server.url, timeout=TIMEOUT) as leaving, strict_server.slowly():
        before = steps()
        with leaving.stream("POST", "/v1/completions", json={**SLOW, "stream": True}, headers=headers) as reply:
            next(reply.iter_bytes())
        assert steps() - before < whole / 2
        before = steps()
        with pytest.raises(httpx.ReadTimeout):
            leaving.post("/v1/completions", json=SLOW, headers=headers, timeout=0.02)
        assert steps() - before < whole / 2


def test_requests_and_responses_are_logged_if_configured(strict_server: ServerProcess) -> None:
    marked = ask(strict_server, prompt=TEXT + " marked", seed=3).json()
    kept = Path(strict_server.flags[1]).parent / "requests.jsonl"
    found: list[dict[str, Any]] = []

    def is_kept() -> bool:
        found[:] = [json.loads(line) for line in kept.read_text().splitlines() if "marked" in line]
        return bool(found)

    wait_for(is_kept)
    assert found[0]["request"]["prompt"].endswith("marked") and found[0]["id"] == marked["id"]
    assert found[0]["answers"][0]["text"] == marked["choices"][0]["text"]
    assert kept.stat().st_mode & 0o077 == 0, "only the owner may read it"
    assert "marked" not in strict_server.log.read_text(), "the log has no prompts"


def test_a_log_line_under_load_as_json(strict_server: ServerProcess) -> None:
    ask(strict_server, **LONG)
    found: list[dict[str, Any]] = []

    def is_reported() -> bool:
        lines = [json.loads(line) for line in strict_server.log.read_text().splitlines() if line.startswith("{")]
        found[:] = [line for line in lines if "tokens_per_second" in line]
        return bool(found)

    wait_for(is_reported)
    assert found[0]["tokens_per_second"] > 0 and "acceptance_rate" in found[0] and found[0]["level"] == "info"
    assert re.search(r"\d running, \d waiting", found[0]["message"])


def test_the_origin_of_each_token(strict_server: ServerProcess) -> None:
    """A fixed draft length, so that some draft tokens are accepted."""
    asked: Any = {"prompt": TEXT * 3, "max_tokens": 30, "temperature": 0, "return_token_origin": True}
    choice = ask(strict_server, **asked).json()["choices"][0]
    assert len(choice["token_origins"]) == len(choice["token_ids"]) == 30
    assert set(choice["token_origins"]) == {"target", "ngram"}
    lines = ask(strict_server, **asked, stream=True).text.split("\n\n")[:-2]
    parts = [part for line in lines for part in json.loads(line.removeprefix("data: "))["choices"]]
    for name in ("token_origins", "token_ids"):
        assert [each for part in parts for each in part.get(name, [])] == choice[name]


def test_a_prediction_is_accounted_for(strict_server: ServerProcess) -> None:
    asked: Any = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = ask(strict_server, **asked).json()["choices"][0]["text"]
    asked |= {"prediction": {"type": "content", "content": whole}, "speculative": {"drafter": "prediction"}}
    reply = ask(strict_server, **asked).json()
    details, drafted = reply["usage"]["completion_tokens_details"], reply["speculation"]["drafters"]["prediction"]
    assert reply["choices"][0]["text"] == whole
    assert details["accepted_prediction_tokens"] == drafted["accepted"] > 0
    assert details["rejected_prediction_tokens"] == drafted["drafted"] - drafted["accepted"]


def test_details_and_both_names(strict_server: ServerProcess) -> None:
    reply = ask(strict_server, prompt=TEXT * 2, max_tokens=40, temperature=0).json()
    spec = reply["metrics"]["speculative_decoding"]
    assert spec["num_spec_tokens"] == 4
    assert sum(spec["per_step_drafted"]) == spec["num_draft_tokens"]
    assert sum(spec["per_step_accepted"]) == spec["num_accepted_draft_tokens"]
    by_length = spec["acceptance_histogram_by_draft_length"]
    assert sum(map(sum, by_length.values())) == spec["num_spec_steps"] > 0
    assert all(len(row) == int(length) + 1 for length, row in by_length.items())
    found = strict_server.metrics()
    assert found["vllm:spec_decode_num_drafts_total"] == found["foretell:spec_decode_num_drafts_total"] > 0
