"""The endpoints over HTTP: responses, accepted fields and errors."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import httpx
import pytest

from foretell import __version__
from foretell.server.openai.requests import UNSUPPORTED_FIELDS
from tests.server.process import CONTEXT, ServerProcess

TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
HELLO = [{"role": "user", "content": "Hello"}]


def test_status_endpoints(server: ServerProcess) -> None:
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.get("/ready").json()["status"] == "ok"
    assert server.http.get("/version").json() == {"version": __version__}
    info = server.http.get("/server_info").json()
    assert info["max_model_len"] == CONTEXT and info["tool_calls"] == "hermes" and info["reasoning"] is True
    parts = [info["memory"][name] for name in ("weights", "drafter", "cache", "step", "program")]
    assert info["memory"]["total"] >= sum(parts) and info["memory"]["program"] > 50_000_000
    assert "avg_spec_accept_length" in info["internal_states"][0]
    assert server.greeting.count("\n") == 1
    assert all(part in server.greeting for part in (server.url, "tiny", "suffix", "rule match", "at most", "cache"))


def test_the_docs_are_a_page_of_our_own(server: ServerProcess) -> None:
    """/docs lists every endpoint and field and loads nothing from other servers."""
    reply = server.http.get("/docs")
    for reported in (
        "POST /v1/chat/completions",
        "POST /tokenize",
        "GET /metrics",
        "max_completion_tokens",
        "cache_salt",
    ):
        assert reported in reply.text, reported
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "<script" not in reply.text and not re.findall(r'(?:src|href)="(?![/#])[^"]*"', reply.text)
    anchors = set(re.findall(r'href="#([^"]+)"', reply.text))
    assert len(anchors) > 30 and anchors <= set(re.findall(r' id="([^"]+)"', reply.text))
    style = re.search(r"<style>(.*?)</style>", reply.text)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in reply.headers["content-security-policy"], "a browser takes the style"


def test_tokens_and_back(server: ServerProcess) -> None:
    found = server.post("/tokenize", prompt=TEXT, return_token_strs=True)
    assert found["count"] == len(list(found["tokens"])) and "".join(list(found["token_strs"])) == TEXT
    assert server.post("/detokenize", tokens=found["tokens"])["prompt"] == TEXT
    chat = server.post("/tokenize", messages=HELLO)
    assert "<|im_start|>user\nHello" in str(server.post("/detokenize", tokens=chat["tokens"])["prompt"])
    assert "prompt" in str(server.post("/tokenize", 400)["error"])
    assert "outside" in str(server.post("/detokenize", 400, tokens=[10**6])["error"])


def complete(server: ServerProcess, **body: Any) -> Any:
    return server.post("/v1/completions", **{"prompt": TEXT, "max_tokens": 8, "temperature": 0, **body})


def test_a_prompt_is_scored_as_evaluations_do(server: ServerProcess) -> None:
    """The request of lm-eval: token ids, echo, and one output token that it ignores."""
    tokens = list(server.post("/tokenize", prompt=TEXT)["tokens"])
    reply = complete(server, prompt=[tokens, tokens[:9]], max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, prompt in zip(reply["choices"], (tokens, tokens[:9]), strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(prompt) + 1
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert all(-50 < value <= 0 for value in found["token_logprobs"][1:])
        for name, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
            assert name in top and top[name] <= max(top.values())
        assert choice["text"].startswith("The quick")
        assert found["text_offset"][1] == len(found["tokens"][0])
    scored = complete(server, prompt=tokens, max_tokens=0, logprobs=1, echo=True)
    assert scored["choices"][0]["text"] == TEXT and scored["usage"]["completion_tokens"] == 0
    same = scored["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert same == pytest.approx(reply["choices"][0]["logprobs"]["token_logprobs"][1:-1], abs=1e-4)


def test_a_streamed_echo_equals_the_complete_one(server: ServerProcess) -> None:
    asked: Any = {"echo": True, "logprobs": 2, "max_tokens": 6}
    whole = complete(server, **asked)["choices"][0]
    parts = [chunk["choices"][0] for chunk in stream(server, "/v1/completions", prompt=TEXT, temperature=0, **asked)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    reported = [part["logprobs"] for part in parts if part["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [value for each in reported for value in each[name]] == whole["logprobs"][name]


MARKED = "<|im_start|>user\nnaïve 한글 \U0001f600<|im_end|>\n"


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_is_the_prompt_as_it_was_sent(server: ServerProcess, as_ids: bool) -> None:
    """Special tokens are included; text offsets are where each token begins."""
    prompt = server.post("/tokenize", prompt=MARKED)["tokens"] if as_ids else MARKED
    choice = complete(server, prompt=prompt, echo=True, logprobs=1, max_tokens=3)["choices"][0]
    assert choice["text"].startswith(MARKED)
    places = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    for token, place in places:
        assert token.startswith("bytes:") or choice["text"].startswith(token, place), (token, place)
    assert ("<|im_end|>", MARKED.index("<|im_end|>")) in places


def stream(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = server.http.post(path, json={**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_what_an_answer_cost(server: ServerProcess) -> None:
    reply = complete(server, max_tokens=30)
    timings, spec = reply["timings"], reply["metrics"]["speculative_decoding"]
    assert timings["predicted_n"] == 30 and timings["prompt_n"] + timings["cache_n"] == reply["usage"]["prompt_tokens"]
    assert timings["draft_n"] == spec["num_draft_tokens"] >= timings["draft_n_accepted"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert reply["speculation"]["rule"] == "match" and reply["speculation"]["lossless"] is True
    plain = complete(server, max_tokens=30, speculative=False)
    assert "draft_n" not in plain["timings"] and "metrics" not in plain
    assert plain["speculation"]["skipped"] == {"user": 30}
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]


def test_every_chunk_has_usage_and_timings_so_far(server: ServerProcess) -> None:
    asked: Any = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "timings_per_token": True}
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, "/v1/completions", **asked)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 12
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == counts
    assert chunks[-2]["timings"]["predicted_ms"] > 0


def test_prompt_progress_comes_with_the_first_chunk(server: ServerProcess) -> None:
    asked: Any = {"prompt": TEXT * 2 + " read", "max_tokens": 6, "n": 2, "return_progress": True}
    chunks = stream(server, "/v1/completions", **asked)
    reported = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert "prompt_progress" in chunks[0] and len(reported) == 2, "once for each choice"
    assert reported[0]["processed"] == reported[0]["total"] > reported[0]["cache"] and reported[0]["time_ms"] > 0


def test_llama_cpp_names_of_draft_limits_are_accepted(server: ServerProcess) -> None:
    plain = complete(server, max_tokens=20)["choices"]
    for said in ({"speculative": {"n_min": 2, "p_min": 0.75}}, {"speculative.n_min": 2, "speculative.p_min": 0.5}):
        assert complete(server, max_tokens=20, **said)["choices"] == plain
    error = server.post("/v1/completions", 400, prompt=TEXT, speculative={"p_min": 3})["error"]
    assert error["param"] == "speculative.p_min"


def test_sums_over_requests_equal_the_counters(server: ServerProcess) -> None:
    before = server.metrics()
    replies = [complete(server, max_tokens=5 + i, seed=i, n=1 + i % 3, temperature=0.7) for i in range(12)]
    replies += [complete(server, prompt=[TEXT, TEXT + " jumps"], speculative=i % 2 == 0) for i in range(4)]
    for i in range(4):
        body = {"messages": HELLO, "max_tokens": 9, "stream_options": {"include_usage": True}, "seed": i}
        replies.append(stream(server, "/v1/chat/completions", **body)[-1])
    replies.append(complete(server, max_tokens=0, echo=True))
    after = server.metrics()

    def grown(name: str) -> float:
        return after.get(f"foretell:{name}", 0.0) - before.get(f"foretell:{name}", 0.0)

    def reported(*path: str) -> float:
        return sum(_dig(reply, path) for reply in replies)

    assert grown("prompt_tokens_total") == reported("usage", "prompt_tokens")
    assert grown("prefix_cache_hits_total") == reported("usage", "prompt_tokens_details", "cached_tokens")
    assert grown("generation_tokens_total") == reported("usage", "completion_tokens") + 1, "the one after the echo"
    spec = ("metrics", "speculative_decoding")
    assert grown("spec_decode_num_drafts_total") == reported(*spec, "num_spec_steps")
    assert (
        grown("spec_decode_num_draft_tokens_total")
        == reported("timings", "draft_n")
        == reported(*spec, "num_draft_tokens")
    )
    accepted = reported("timings", "draft_n_accepted")
    assert grown("spec_decode_num_accepted_tokens_total") == accepted
    assert grown("speculative_decoding_accepted_tokens_total") == accepted
    places = [name for name in after if name.startswith("foretell:spec_decode_num_accepted_tokens_per_pos_total")]
    assert sum(after[name] - before.get(name, 0.0) for name in places) == accepted
    by_drafter = [name for name in after if name.startswith("foretell:drafter_accepted_tokens_total")]
    assert sum(after[name] - before.get(name, 0.0) for name in by_drafter) == accepted
    for reason in {reason for reply in replies for reason in reply["speculation"]["skipped"]}:
        name = f'spec_decode_skipped_total{{reason="{reason}"}}'
        assert grown(name) == reported("speculation", "skipped", reason), reason


def _dig(reply: dict[str, Any], path: tuple[str, ...]) -> float:
    found: Any = reply
    for name in path:
        found = found.get(name, {})
    return float(found or 0)


def test_metrics_answer_to_the_names_people_look_for(server: ServerProcess) -> None:
    text = server.http.get("/metrics").text
    lines = [line for line in text.splitlines() if "speculative" in line]
    for name in ("acceptance_rate", "accepted_tokens", "rejected_tokens"):
        assert any(f"speculative_decoding_{name}" in line for line in lines)
    found = server.metrics()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "speedup"):
        assert f"foretell:{name}" in found
    assert found["foretell:time_to_first_token_seconds_count"] > 0
    assert 0 <= found["foretell:speculative_decoding_acceptance_rate"] <= 1
    assert "_created" not in text


def test_tenants_share_no_cache(server: ServerProcess) -> None:
    prompt = "She sells sea shells by the sea shore. " * 4

    def found(key: str, salt: str | None = None) -> int:
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "cache_salt": salt}
        headers = {"Authorization": f"Bearer {key}"}
        usage = server.http.post("/v1/completions", json=body, headers=headers).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert found("anna") == 0 and found("anna") > 0, "one's own text is found again"
    assert found("berta") == 0, "and only its own"
    assert found("anna", "pepper") == 0 and found("anna", "pepper") > 0
    assert found("berta", "pepper") == 0


HARMLESS: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True,
    "safety_identifier": "x", "prompt_cache_key": "k", "logit_bias": {}, "modalities": ["text"], "best_of": 1,
    "use_beam_search": False, "response_format": {"type": "text"}, "tools": None,
    "functions": None, "unheard_of": None, "tool_choice": "auto", "cache_prompt": True,
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_fields_without_effect_are_accepted(server: ServerProcess, name: str) -> None:
    server.post("/v1/chat/completions", messages=HELLO, max_tokens=1, **{name: HARMLESS[name]})


WRONG: dict[str, Any] = {
    "temperature": "warm", "top_p": 0, "top_k": -5, "min_p": 2, "presence_penalty": 9, "frequency_penalty": -9,
    "repetition_penalty": 0, "max_tokens": 0, "min_tokens": -1, "n": 0, "seed": 1.5, "stop": [""],
    "logit_bias": {"x": 1}, "top_logprobs": 2, "tool_choice": "required", "response_format": {"type": "xml"},
    "structured_outputs": {}, "guided_json": "{", "guided_choice": [], "prediction": {"type": "content"},
    "thinking_budget": -1, "chat_template_kwargs": {"messages": []},
    "speculative": {"max_draft": 1000}, "stream_options": {"include_usag": True}, "allowed_token_ids": [],
    "bad_words": [""], "stop_token_ids": [-1], "temprature": 1, "messages": [],
    **dict.fromkeys(UNSUPPORTED_FIELDS, "something"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_supported_is_refused_by_name(server: ServerProcess, name: str) -> None:
    reply = server.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, name: WRONG[name]})
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["param"].split(".")[0] in (name, "structured_outputs"), error
    assert error["message"] and error["type"] == "invalid_request_error"


def test_a_request_may_have_a_deadline(server: ServerProcess) -> None:
    plain = complete(server, max_tokens=20, speculative=False)["choices"]
    for slo in ({"deadline": 0.5}, {"min_tokens_per_second": 1e4}):
        assert complete(server, max_tokens=20, speculative=slo)["choices"] == plain
    error = server.post("/v1/completions", 400, prompt=TEXT, max_tokens=1, speculative={"deadline": -1})["error"]
    assert "deadline" in error["param"] and "above 0" in error["message"]


def test_a_name_that_is_nearly_right_gets_the_right_one(server: ServerProcess) -> None:
    error = server.post("/v1/chat/completions", 400, messages=HELLO, temprature=1)["error"]
    assert "did you mean 'temperature'?" in str(error)
    nested = server.post("/v1/chat/completions", 400, messages=HELLO, speculative={"drafter": "ngrm"})["error"]
    assert "ngrm" in str(nested)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n_predict": 1}, "n_predict", "n_predict: is not known; did you mean 'max_tokens'?"),
        ({"drafter": "ngram"}, "drafter", "drafter: is not known; put it into speculative"),
        ({"temprature": 1}, "temprature", "temprature: is not known; did you mean 'temperature'?"),
        ({"speculative": {"drafer": "ngram"}}, "speculative.drafer", "is not known; did you mean 'drafter'?"),
        (
            {"stream_options": {"include_usge": 1}},
            "stream_options.include_usge",
            "stream_options.include_usge: is not known; did you mean 'include_usage'?",
        ),
    ],
)
def test_an_unknown_field_is_answered_with_at_most_one_other(
    server: ServerProcess, fields: dict[str, Any], param: str, message: str
) -> None:
    error = server.post("/v1/chat/completions", 400, messages=HELLO, **fields)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_parameter")
    assert error["param"] == param and error["message"].endswith(message) and len(error["message"]) < 100


def test_a_setting_is_not_sent_to_an_object_that_the_request_has_not(server: ServerProcess) -> None:
    reply = server.http.post("/tokenize", json={"prompt": "a", "drafter": "ngram"})
    assert reply.status_code == 200 and reply.headers["x-foretell-ignored-fields"] == "drafter"


def test_an_unknown_field_is_ignored_and_named(server: ServerProcess) -> None:
    plain = complete(server, temperature=0)["choices"]
    more = {"provider": {"sort": "price"}, "zzz": 1, "no\r\nheader: x": 2, "stream_options": {"zzz": 1}}
    reply = server.http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 8, "temperature": 0, **more})
    assert reply.headers["x-foretell-ignored-fields"] == "provider, zzz, ?, stream_options.zzz"
    assert "header" not in reply.headers and reply.json()["choices"][0]["text"] == plain[0]["text"]
    reply = server.http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 1, "stream": True, "zzz": 1})
    assert reply.headers["x-foretell-ignored-fields"] == "zzz" and "[DONE]" in reply.text
    assert "x-foretell-ignored-fields" not in server.http.post("/v1/completions", json={"prompt": TEXT}).headers


def test_very_many_unknown_fields_are_refused(server: ServerProcess) -> None:
    error = server.post("/v1/completions", 400, prompt=TEXT, **{f"zzz{i}": 1 for i in range(100)})["error"]
    assert error["code"] == "unsupported_parameter" and error["param"] == "zzz0"


def test_a_prompt_beyond_the_context_has_the_code_that_clients_know(server: ServerProcess) -> None:
    words = "wort " * CONTEXT
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words * 500}]}),
        ("/v1/completions", {"prompt": words}),
        ("/v1/completions", {"prompt": [1] * CONTEXT}),
        ("/v1/completions", {"prompt": [1] * (CONTEXT + 1)}),
    ):
        error = server.post(path, 400, **body)["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] in ("prompt", "messages")
        assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens. However, ")


def test_max_tokens_beyond_the_context_is_lowered(server: ServerProcess) -> None:
    prompt = [1] * (CONTEXT - 3)
    reply = server.post("/v1/completions", prompt=prompt, max_tokens=32_000, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 3 and reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("body", ["", "{", "[]", "3", '{"messages": ' + "[" * 5000, "\xff"])
def test_bodies_that_are_no_requests(server: ServerProcess, body: str) -> None:
    headers = {"content-type": "application/json"}
    reply = server.http.post("/v1/chat/completions", content=body.encode("latin-1"), headers=headers)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/responses/resp_1/cancel", "of OpenAI's Responses API there are"),
        ("POST", "/v1/embeddings", "has no embeddings"),
        ("GET", "/v1/nothing", "of OpenAI's API there are chat completions"),
        ("GET", "/nothing", "there is no GET /nothing; this server has"),
    ],
)
def test_an_unknown_path_is_answered_with_the_routes(server: ServerProcess, method: str, path: str, hint: str) -> None:
    reply = server.http.request(method, path, json={"input": "Hello"} if method == "POST" else None)
    error = reply.json()["error"]
    assert reply.status_code == 404 and (error["type"], error["code"]) == ("invalid_request_error", "not_found")
    assert hint in error["message"] and "\n" not in error["message"]
    for route in ("POST /v1/chat/completions", "GET /v1/models", "POST /tokenize", "GET /metrics", "GET /docs"):
        assert route in error["message"]


def test_a_wrong_method_is_answered_with_the_right_one(server: ServerProcess) -> None:
    reply = server.http.get("/v1/completions")
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"
    assert reply.json()["error"]["message"] == "GET /v1/completions is not allowed; use POST"


def test_pages_of_other_origins_get_no_leave(server: ServerProcess) -> None:
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    reply: httpx.Response = server.http.request("OPTIONS", "/v1/chat/completions", headers=headers)
    assert "access-control-allow-origin" not in reply.headers
