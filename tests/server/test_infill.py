"""Fill-in-the-middle, and llama.cpp's own endpoints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.engine.streams import StreamItem
from foretell.server.choice_state import ChoiceState
from foretell.server.llama_cpp import response_builder
from foretell.server.llama_cpp.requests import LlamaCompletionRequest
from foretell.server.llama_cpp.response_builder import LlamaResponseBuilder
from foretell.tokenizer import Tokenizer
from foretell.tokenizer.fim import FimTokens, find_fim_tokens
from foretell.types import Delta, SpeculationChoice
from tests.server.process import CONTEXT, ServerProcess, write_server_folder
from tests.server.test_schema import attack

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
BEFORE, AFTER = "The quick brown", " the lazy dog."


@pytest.fixture(scope="module")
def fim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the tiny model with names of Qwen's fill-in-the-middle tokens for some of its last tokens."""
    folder = write_server_folder(tmp_path_factory.mktemp("fim") / "model")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    last = sorted(vocab, key=lambda text: int(vocab[text]))[-len(NAMES) :]
    for name, replaced in zip(NAMES, last, strict=True):
        token = vocab.pop(replaced)
        content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != replaced]
        vocab[name] = token
        entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"].append({"id": token, "content": name, **entry})
    file.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def fim(fim_folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(fim_folder, "--max-num-seqs", "4") as process:
        yield process


def tokens_of(server: ServerProcess, text: str) -> list[int]:
    return list(server.post("/tokenize", content=text)["tokens"])


def prompt_of(reply: dict[str, Any]) -> str:
    return str(reply["prompt"])


def test_a_gap_is_filled_by_the_models_own_tokens(fim: ServerProcess) -> None:
    asked: Any = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    filled = fim.post("/v1/completions", prompt=BEFORE, suffix=AFTER, **asked)["choices"][0]["text"]
    by_hand = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    prompt = tokens_of(fim, by_hand)
    ends = tokens_of(fim, "<|fim_pad|><|repo_name|><|file_sep|>")
    same = fim.post("/v1/completions", prompt=prompt, stop_token_ids=ends, **asked)["choices"][0]["text"]
    infill = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 12, "temperature": 0, "ignore_eos": True}
    for on in (True, False):
        reply = fim.post("/infill", **infill, speculative=on)
        assert reply["content"] == same == filled and prompt_of(reply) == by_hand
    assert reply["stop"] is True and reply["stop_type"] == "limit" and reply["tokens_predicted"] == 12
    options = {"num_predict": 12, "temperature": 0}
    ollama = fim.post("/api/generate", prompt=BEFORE, suffix=AFTER, stream=False, options=options)
    assert filled.startswith(ollama["response"]) and ollama["prompt_eval_count"] == len(prompt)
    assert fim.post("/v1/completions", prompt=BEFORE, suffix="", **asked)["choices"][0]["text"] != filled
    assert "insert" in fim.post("/api/show")["capabilities"]


def test_other_files_come_first_as_far_as_they_fit(fim: ServerProcess) -> None:
    files = [{"filename": "a.py", "text": "x = 1"}, {"filename": "b.py", "text": "y = 2"}]
    body: Any = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 1}
    found = prompt_of(fim.post("/infill", **body, input_extra=files, prompt=" fox"))
    start = "<|repo_name|>project\n<|file_sep|>a.py\nx = 1<|file_sep|>b.py\ny = 2"
    assert found == f"{start}<|fim_prefix|>{BEFORE} fox<|fim_suffix|>{AFTER}<|fim_middle|>"
    long = [{"filename": "long.py", "text": "word " * CONTEXT}, files[1]]
    found = prompt_of(fim.post("/infill", **body, input_extra=long))
    assert found.startswith("<|file_sep|>b.py\ny = 2<|fim_prefix|>")
    error = fim.post("/infill", 400, **body, input_extra=[{"text": "x" * 1000 * CONTEXT}])["error"]
    assert error["param"] == "input_extra"


def test_names_of_tokens_in_the_code_are_code(fim: ServerProcess, fim_folder: Path) -> None:
    """An editor's file may be about such tokens; the prompt has those of its own and no others."""
    code = 'MIDDLE = "<|fim_middle|>"  # <|fim_suffix|> <|im_end|> <|file_sep|>'
    assert all(len(tokens_of(fim, name)) == 1 for name in NAMES)
    files = {name: (fim_folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    spelled = len(Tokenizer.from_files(files).encode_plain(code))
    assert spelled > len(tokens_of(fim, code)) + 10
    gap: Any = {"input_prefix": code, "input_suffix": code, "n_predict": 1}
    reply = fim.post("/infill", **gap)
    assert prompt_of(reply) == f"<|fim_prefix|>{code}<|fim_suffix|>{code}<|fim_middle|>"
    assert reply["tokens_evaluated"] == 2 * spelled + 3
    extra = fim.post("/infill", **gap, input_extra=[{"filename": code, "text": code}])
    assert prompt_of(extra) == f"<|repo_name|>project\n<|file_sep|>{code}\n{code}{prompt_of(reply)}"
    assert extra["tokens_evaluated"] > 4 * spelled + 5
    options = {"num_predict": 1}
    ollama = fim.post("/api/generate", prompt=code, suffix=code, stream=False, options=options)
    assert ollama["prompt_eval_count"] == 2 * spelled + 3


def test_a_model_without_the_tokens_refuses_by_name(server: ServerProcess) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        error = server.post(path, 400, **body)["error"]
        assert error["param"] in body and "fill-in-the-middle" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_prefix": 1, "input_suffix": ""}, "input_prefix"),
        ({"input_prefix": "a", "input_suffix": "", "input_extra": [{"filename": "x"}]}, "input_extra.0.text"),
        ({"input_prefix": "a " * 2 * CONTEXT, "input_suffix": ""}, "prompt"),
        ({"input_prefix": "a", "input_suffix": "", "grammar": "root ::= x"}, "grammar"),
        ({"input_prefix": "a", "input_suffix": "", "temperature": -1}, "temperature"),
        ({"input_prefix": "a", "input_suffix": "", "repeat_penalty": 0}, "repeat_penalty"),
        ({"input_prefix": "a", "input_suffix": "", "top_k": -2}, "top_k"),
        ({"input_prefix": "a", "input_suffix": "", "top_p": 1.5}, "top_p"),
        ({"input_prefix": "a", "input_suffix": "", "n_probs": 21}, "n_probs"),
        ({"input_prefix": "a", "input_suffix": "", "n_probs": 1, "post_sampling_probs": True}, "post_sampling_probs"),
    ],
)
def test_bad_requests_are_refused(fim: ServerProcess, body: dict[str, Any], param: str) -> None:
    assert fim.post("/infill", 400, **body)["error"]["param"] == param


def test_the_time_limit_ends_after_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(100.0)  # each look at the clock is a second later
    monkeypatch.setattr(response_builder, "perf_counter", lambda: next(seconds))
    request: Any = SimpleNamespace(drafters=(), speculation=SpeculationChoice(enabled=False))
    job: Any = SimpleNamespace(choices=lambda: [ChoiceState(request, 0)])

    def finished_after(limit: int | None, *texts: str) -> list[bool]:
        body = LlamaCompletionRequest(prompt="a", t_max_predict_ms=limit, response_fields=["stop"])
        builder = LlamaResponseBuilder(job, body, "tiny", SimpleNamespace(decode=lambda *args, **more: ""))  # type: ignore[arg-type]
        builder.response = dict  # type: ignore[method-assign]
        state: Any = SimpleNamespace(prompt_logprobs={}, seq=SimpleNamespace(request=request))
        found = []
        for text in texts:
            builder.add(StreamItem(Delta("a", 0, (1,), text, ("target",)), state, is_first=False))
            found.append(builder.finished)
        return found

    assert finished_after(1, "one", " line\n", "two") == [False, True, True]
    for limit in (10**9, None, 0, -1):
        assert finished_after(limit, "one", "\n") == [False, False]


def test_the_schema_of_gaps_is_as_strict_as_the_checks(fim: ServerProcess, tmp_path: Path) -> None:
    paths = ("/infill", "/api/generate", "/v1/completions")
    flags = [word for path in paths for word in ("--include-path", path)]
    attack(fim, tmp_path, "--phases", "coverage,fuzzing", "--max-examples", "20", *flags)


def test_a_late_gap_is_aborted(fim: ServerProcess) -> None:
    body: Any = {"input_prefix": "", "input_suffix": "", "n_predict": 300, "ignore_eos": True, "t_max_predict_ms": 1}
    reply = fim.post("/infill", **body)
    assert reply["stop_type"] == "eos" or reply["has_new_line"] == (reply["tokens_predicted"] < 300)


def events(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = server.http.post(path, json={**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line]


def test_a_completion_in_llama_cpps_shape_streamed_and_not(server: ServerProcess) -> None:
    body: Any = {"prompt": BEFORE, "n_predict": 10, "temperature": 0, "return_tokens": True, "id_slot": 2, "zzz": 1}
    whole = server.post("/completion", **body)
    parts = events(server, "/completion", **body)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts[:-1] for token in part["tokens"]] == whole["tokens"]
    assert all(not part["stop"] for part in parts[:-1]) and parts[-1]["stop"] is True
    assert parts[-1]["tokens_predicted"] == 10 and parts[-1]["timings"]["predicted_n"] == 10
    same = server.post("/v1/completions", prompt=BEFORE, max_tokens=10, temperature=0)["choices"][0]["text"]
    assert whole["content"] == same
    mixed = [tokens_of(server, "The quick")[0], *tokens_of(server, "The quick")[1:], " brown"]
    assert prompt_of(server.post("/completion", **{**body, "prompt": mixed})) == BEFORE
    stop = whole["content"][3:5]
    cut = server.post("/completion", **body, stop=[stop])
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", stop)
    chosen = server.post("/completion", **body, response_fields=["content", "timings/predicted_n", "no/such"])
    assert chosen == {"content": whole["content"], "timings/predicted_n": 10}
    warm = server.post("/completion", **{**body, "n_predict": 0})
    assert (warm["content"], warm["tokens"], warm["tokens_predicted"]) == ("", [], 0)


def test_logprobs_in_llama_cpps_shape_streamed_and_not(server: ServerProcess) -> None:
    body: Any = {"prompt": BEFORE, "n_predict": 6, "temperature": 0, "n_probs": 3, "return_tokens": True}
    whole = server.post("/completion", **body)
    rows = whole["completion_probabilities"]
    assert [row["id"] for row in rows] == whole["tokens"] and whole["generation_settings"]["n_probs"] == 3
    assert bytes(byte for row in rows for byte in row["bytes"]).decode(errors="replace") == whole["content"]
    openai = server.post("/v1/completions", prompt=BEFORE, max_tokens=6, temperature=0, logprobs=3)["choices"][0]
    assert [row["logprob"] for row in rows] == openai["logprobs"]["token_logprobs"]
    for row in rows:
        assert [set(top) for top in row["top_logprobs"]] == [{"id", "token", "bytes", "logprob"}] * 3
        assert row["top_logprobs"][0]["id"] == row["id"], "greedy"
    *parts, last = events(server, "/completion", **body)
    assert [row for part in parts for row in part["completion_probabilities"]] == rows
    assert "completion_probabilities" not in last
    without = server.post("/completion", **{**body, "n_probs": 0})
    assert "completion_probabilities" not in without and without["content"] == whole["content"]
    assert server.post("/completion", **{**body, "n_predict": 0})["completion_probabilities"] == []


def test_defaults_that_llama_cpps_clients_send(server: ServerProcess) -> None:
    given: Any = {"seed": 2**32 - 1, "t_max_predict_ms": -1, "top_k": -1, "repeat_penalty": 1.0, "n_probs": 0}
    assert LlamaCompletionRequest(prompt="a", **given).as_completion("a", 1, 1).seed is None
    assert server.post("/completion", prompt="a", n_predict=-2, stop=["e", "a", "\n"], **given)["stop"] is True
    error = server.post("/completion", 400, prompt=["a", "b"])["error"]
    assert error["param"] == "prompt" and "one request for each" in error["message"]


def test_what_editors_ask_about_the_server(server: ServerProcess) -> None:
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT and "<|im_start|>" in props["chat_template"]
    slots = server.http.get("/slots").json()
    assert len(slots) == props["total_slots"] and not any(slot["is_processing"] for slot in slots)
    plain = server.post("/tokenize", content="Hello there")
    pieces = server.post("/tokenize", content="Hello there", with_pieces=True)["tokens"]
    assert [each["id"] for each in pieces] == plain["tokens"] and "".join(p["piece"] for p in pieces) == "Hello there"
    assert server.post("/detokenize", tokens=plain["tokens"])["content"] == "Hello there"
    chat = server.post("/apply-template", messages=[{"role": "user", "content": "Hi"}])["prompt"]
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "error" in server.post("/tokenize", 400, prompt="a", content="a")


def test_keys_guard_them(strict_server: ServerProcess) -> None:
    for path in ("/props", "/slots"):
        assert strict_server.http.get(path).status_code == 401
    for path in ("/completion", "/infill", "/apply-template"):
        assert strict_server.http.post(path, json={}).status_code == 401


def test_tokens_by_name_and_by_file(fim_folder: Path) -> None:
    files = {name: (fim_folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    found = Tokenizer.from_files(files).fim
    assert found is not None and None not in (found.middle, found.pad, found.repo, found.separator)
    assert found.ends == (found.pad, found.repo, found.separator)
    codestral = {"[PREFIX]": 5, "[SUFFIX]": 6}
    last = find_fim_tokens(codestral.get, {})
    assert last == FimTokens(5, 6) and last.prompt([1, 2], [3], [0]) == [0, 6, 3, 5, 1, 2]
    assert find_fim_tokens({"<PRE>": 1, "<SUF>": 2, "<MID>": 3}.get, {"middle": 9}) == FimTokens(1, 2, 9)
    assert find_fim_tokens({"<PRE>": 1}.get, {}) is None
    codellama = find_fim_tokens({"▁<PRE>": 1, "▁<SUF>": 2, "▁<MID>": 3, "▁<EOT>": 4}.get, {})
    assert codellama == FimTokens(1, 2, 3, end=4) and codellama.ends == (4,)
