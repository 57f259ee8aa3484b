"""`return_token_details` and `return_rounds` of a response, and the totals of /server_info."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import KEYS
from tests.server.process import ServerProcess

TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
ASKED: dict[str, Any] = {"prompt": TEXT, "max_tokens": 40, "seed": 5, "temperature": 0.7, "ignore_eos": True}
SAID = [{"role": "user", "content": TEXT}]
CHAT: dict[str, Any] = {"messages": SAID, "max_tokens": 40, "seed": 5, "ignore_eos": True}


def chunks(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASKED), ("/v1/chat/completions", CHAT)])
def test_a_stream_has_the_details_of_the_complete_response(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    plain = server.post(path, **body)["choices"][0]
    whole = server.post(path, **body, return_token_details=True)["choices"][0]
    streamed = [each for chunk in chunks(server, path, **body, return_token_details=True) for each in chunk["choices"]]
    tokens = [token for each in streamed for token in each.get("token_details", ())]
    rounds = [each for choice in streamed for each in choice.get("rounds", ())]

    assert text_of(whole) == text_of(plain) and "token_details" not in plain and "rounds" not in plain
    assert "".join(token["text"] for token in tokens) == text_of(whole)
    assert [target_details(token) for token in tokens] == [target_details(token) for token in whole["token_details"]]
    assert len(tokens) == 40 == sum(each["tokens"] for each in rounds)
    for each in rounds:
        assert each["tokens"] == each["accepted"] + 1 or each is rounds[-1]
        assert (each["skipped"] is None) == (each["drafted"] > 0) == (each["drafter"] is not None)
        assert each["drafting_ms"] + each["target_ms"] <= each["step_ms"] + 0.01 and each["texts"] >= 1
    assert [each["at_ms"] for each in rounds] == sorted(each["at_ms"] for each in rounds)


def test_rounds_are_returned_without_token_details(server: ServerProcess) -> None:
    whole = server.post("/v1/completions", **ASKED, return_rounds=True, return_token_origin=True)["choices"][0]
    assert "token_details" not in whole and sum(each["tokens"] for each in whole["rounds"]) == 40
    assert "".join(whole["token_texts"]) == whole["text"] and len(whole["token_texts"]) == len(whole["token_ids"]) == 40
    some = [
        each for chunk in chunks(server, "/v1/completions", **ASKED, return_rounds=True) for each in chunk["choices"]
    ]
    assert sum(each["tokens"] for choice in some for each in choice.get("rounds", ())) == 40
    assert not any("token_texts" in choice or "token_details" in choice for choice in some)


def test_the_schema_has_every_field_of_a_choice(server: ServerProcess) -> None:
    asked = {"return_rounds": True, "return_token_origin": True, "return_token_details": True}
    found = server.post("/v1/completions", **ASKED, **asked)["choices"][0]
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert set(found) <= set(schemas["TextChoice"]["properties"])
    assert set(found["rounds"][0]) <= set(schemas["SpeculationRound"]["properties"])
    assert set(found["token_details"][0]) <= set(schemas["TokenDetails"]["properties"])


def target_details(token: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that do not depend on the drafter."""
    return token["id"], token["text"], round(token["probability"], 3)


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_draft_tokens_are_returned_with_their_drafter(strict_server: ServerProcess) -> None:
    few = {"allowed_token_ids": [60, 61, 62]}  # of which any text repeats itself
    body = {**ASKED, **few, "temperature": 0, "max_tokens": 120, "return_token_details": True}
    key = {"Authorization": f"Bearer {KEYS[0]}"}
    reply = strict_server.http.post("/v1/completions", json=body, headers=key).json()
    choice, record = reply["choices"][0], reply["speculation"]["drafters"]["ngram"]
    drafted = [token for token in choice["token_details"] if token["origin"] == "ngram"]
    assert len(drafted) == record["accepted"] == sum(each["accepted"] for each in choice["rounds"]) > 10
    assert record["drafted"] == sum(each["drafted"] for each in choice["rounds"])
    assert all(0 < token["draft_confidence"] <= 1 for token in drafted)
    assert all(token["draft_probability"] is None for token in drafted), "an n-gram's confidence is no probability"
    rejected = [draft_token for token in choice["token_details"] for draft_token in token["rejected"]]
    assert all(0 <= each["probability"] <= 1 and each["text"] for each in rejected)
    plain = [each["plain_ms"] for each in choice["rounds"] if each["plain_ms"] is not None]
    assert plain and all(each > 0 for each in plain)


def test_the_last_token_gets_an_incomplete_character(server: ServerProcess) -> None:
    """The tokens of a truncated output add up to the output."""
    for limit in range(1, 12):
        body = {**ASKED, "prompt": "été 你好", "temperature": 1.5, "max_tokens": limit}
        choice = server.post("/v1/completions", **body, return_token_details=True)["choices"][0]
        assert "".join(token["text"] for token in choice["token_details"]) == choice["text"]


def test_server_info_has_the_decisions(server: ServerProcess) -> None:
    server.post("/v1/completions", **ASKED)
    info = server.http.get("/server_info").json()
    assert "match" in info["rules"]["lossless"] and "typical" in info["rules"]["lossy"]
    (state,) = info["internal_states"]
    assert state["tokens"] >= 40 and 0 < state["target_seconds"] + state["drafting_seconds"] <= state["step_seconds"]
    assert state["accepted_per_position"] == sorted(state["accepted_per_position"], reverse=True)
    by_drafter = info["speculation"]["drafters"]
    assert {each["drafter"] for each in info["speculation"]["decisions"]} <= set(info["drafters"])
    assert set(by_drafter) <= {*info["drafters"], "grammar"} and isinstance(info["speculation"]["on"], bool)
    assert sum(each["accepted"] for each in by_drafter.values()) == sum(state["accepted_per_position"])
