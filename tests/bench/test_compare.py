"""The same prompts through others: who they are, what they tell, and what is made of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.bench.check import running_requests
from foretell.bench.compare import remarks, report_table, run_compare
from foretell.bench.http_client import MAX_LINE_BYTES, Address
from foretell.bench.peers import Endpoint, PeerReply, TransformersPeer, accepted_draft_tokens
from foretell.bench.prompt import BenchPrompt, RequestParams
from foretell.bench.settings import CompareSettings
from foretell.bench.workloads import load
from foretell.cli import main as program
from foretell.errors import ForetellError, RequestError
from tests.server.process import ServerProcess

from .fakes import ignore_progress, items
from .peers import Script, serving, speaking

CHAT = BenchPrompt("hello", "chat", ({"role": "user", "content": "Hi"},))
ASKED = RequestParams(8, 0.0)


@pytest.mark.parametrize(
    ("text", "name", "port", "extra"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080", 8080, {}),
        ("llama=http://127.0.0.1:8080/v1", "llama", 8080, {}),
        (
            "off=127.0.0.1:9?speculative=false&top_k=1&rule=match",
            "off",
            9,
            {"speculative": False, "top_k": 1, "rule": "match"},
        ),
        ("127.0.0.1:9?a=b", "127.0.0.1:9", 9, {"a": "b"}),
    ],
)
def test_a_peer_is_a_name_and_an_address(text: str, name: str, port: int, extra: dict[str, Any]) -> None:
    peer = Endpoint.parse(text, "key")
    assert (peer.name, peer.address, peer.extra) == (name, Address("127.0.0.1", port, key="key"), extra)


def test_llama_cpp_reports_draft_tokens_in_its_answer() -> None:
    script = Script("llamacpp", timings={"predicted_n": 8, "draft_n": 10, "draft_n_accepted": 4})
    with serving(script) as url:
        peer = Endpoint.parse(f"llama={url}?seed=3")
        peer.connect()
        reply = peer.generate(CHAT, ASKED)
    assert (reply.text, reply.tokens, reply.steps, reply.error) == ("one two three four", 8, 4.0, None)
    assert reply.first is not None and 0 < reply.first <= reply.last
    (body,) = script.params
    assert body["cache_prompt"] is False and body["model"] == "folder/m.gguf" and body["seed"] == 3
    assert (body["max_tokens"], body["temperature"], body["messages"]) == (8, 0.0, list(CHAT.messages))
    assert peer.describe() == {"address": url.removeprefix("http://"), "kind": "llamacpp", "model": "m.gguf", "seed": 3}


def test_without_draft_tokens_a_step_is_a_token() -> None:
    with serving(Script("llamacpp", timings={"predicted_n": 8})) as url:
        peer = Endpoint.parse(url)
        peer.connect()
        assert peer.generate(CHAT, ASKED).steps == 8.0


def test_vllm_reports_draft_tokens_in_its_metrics() -> None:
    script = Script("vllm")
    script.metrics = 'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}.0\nother 3\n'
    with serving(script) as url:
        peer = Endpoint.parse(url)
        peer.connect()
        replies = [peer.generate(CHAT, ASKED) for _ in range(2)]
    assert peer.reads_metrics and [reply.steps for reply in replies] == [4.0, 4.0], "8 tokens, 4 of them drafted"
    salts = {body["cache_salt"] for body in script.params}
    assert len(salts) == 2, "no request hits the prefix cache"


def test_a_server_without_speculation_counts_is_still_timed() -> None:
    script = Script("unknown")
    with serving(script) as url:
        peer = Endpoint.parse(url)
        peer.connect()
        reply = peer.generate(BenchPrompt("text", "t", text="Once upon"), ASKED)
    assert reply.steps is None and reply.tokens == 8 and not peer.reads_metrics
    assert script.params[0]["prompt"] == "Once upon" and "cache_salt" not in script.params[0]


def test_an_answer_without_a_token_count_is_an_error() -> None:
    script = Script("unknown")
    script.usage = None
    with serving(script) as url:
        assert "number of tokens" in str(Endpoint.parse(url).generate(CHAT, ASKED).error)


def test_metrics_by_any_prefix() -> None:
    name = "spec_decode_num_accepted_tokens_total"
    assert accepted_draft_tokens(f'# HELP x\nvllm:{name}{{engine="0"}} 3.0\nvllm:{name}{{engine="1"}} 4.0\n') == 7.0
    assert accepted_draft_tokens(f"{name} 5") == 5.0
    assert accepted_draft_tokens(f"{name}_per_pos 5\n") is None


def test_an_unreachable_server_is_reported_before_any_request() -> None:
    script = Script("vllm")
    for script.status, words in [
        (401, "returns 401; give its key with --api-key"),
        (503, "returns 503.*a ready server"),
    ]:
        with serving(script) as url, pytest.raises(RequestError, match=words):
            Endpoint.parse(url).connect()
    with pytest.raises(RequestError, match="no server at 127.0.0.1:1; start it"):
        Endpoint.parse("http://127.0.0.1:1").connect()


@pytest.mark.parametrize("words", [b"220 mail ready\r\n\r\n", b"x" * 2 * MAX_LINE_BYTES], ids=["greeting", "endless"])
def test_a_port_without_http_is_reported(words: bytes) -> None:
    with speaking(words) as url:
        peer = Endpoint.parse(url)
        with pytest.raises(RequestError, match="is not an HTTP server; name a server with the OpenAI API"):
            peer.connect()
        assert running_requests(peer) == 0, "nor has it metrics"
        assert peer.generate(CHAT, ASKED).error is not None
        peer.reads_metrics = True
        assert peer.generate(CHAT, ASKED).steps is None


TRACED = {
    "messages": [{"role": "user", "content": "Hi"}],
    "stop": ["."],
    "top_p": 0.9,
    "temperature": 0.7,
    "seed": 5,
    "max_tokens": 99,
    "response_format": {"type": "json_object"},
    "prediction": {"type": "content", "content": "Hello"},
    "user": "someone",
}


def test_a_request_of_ones_own_is_asked_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(TRACED) + "\n")
    (item,) = load("trace", path)
    (script, other), usual = (Script("vllm"), Script("vllm")), CompareSettings(max_tokens=8)
    for each, settings in ((script, usual), (other, replace(usual, temperature=0.0))):
        with serving(each) as url:
            Endpoint.parse(url).generate(item, settings.request_params(item))
    (body,) = script.params
    same = ("messages", "stop", "top_p", "temperature", "seed", "response_format", "prediction")
    assert {name: body.get(name) for name in same} == {name: TRACED[name] for name in same}
    assert body["max_tokens"] == 8 and "user" not in body
    assert other.params[0]["temperature"] == 0.0, "what was typed goes before"
    model = TransformersPeer.__new__(TransformersPeer)  # it is refused before anything of it is needed
    assert model.generate(item, ASKED, False).error == "transformers does not support top_p, stop, response_format here"


class FakePeer:
    """Takes a known time for a token."""

    def __init__(self, name: str, seconds: Callable[[BenchPrompt], float], text: str = "same", **reply: Any) -> None:
        self.name, self.seconds, self.text, self.reply = name, seconds, text, reply
        self.log: list[str] = []
        self.stop_after = 999

    def generate(self, item: BenchPrompt, params: RequestParams) -> PeerReply:
        if len(self.log) == self.stop_after:
            raise KeyboardInterrupt
        self.log.append(item.id)
        return PeerReply(
            **{"text": self.text, "tokens": 11, "first": 1.0, "last": 1.0 + 10 * self.seconds(item), **self.reply}
        )

    def describe(self) -> dict[str, Any]:
        return {}


def test_the_ratio_is_by_pairs_and_the_first_round_is_dropped() -> None:
    base = FakePeer("base", lambda item: 1.0, steps=11.0)
    fast = FakePeer("fast", lambda item: 0.25 if item.task == "code" else 1.0, "other", steps=5.5)
    found = run_compare(
        [base, fast], items(code=2, chat=2), CompareSettings(rounds=2), "base", ignore_progress, {"model": "m"}
    )
    assert len(base.log) == len(fast.log) == 4 * 3
    cells = {(cell.task, cell.peer): cell for cell in found.cells}
    assert cells["code", "fast"].speedup == pytest.approx(4.0) and cells["code", "base"].speedup == pytest.approx(1.0)
    assert cells["code", "fast"].tokens_per_second == pytest.approx(4.0)
    assert cells["code", "fast"].accepted_per_step == pytest.approx(2.0)
    assert (cells["code", "fast"].same_text, cells["code", "base"].num_same) == (False, 2)
    overall = {cell.peer: cell for cell in found.overall}
    assert overall["fast"].speedup == pytest.approx(2.0), "the geometric mean of the tasks"
    assert overall["fast"].speedup_interval == pytest.approx((2.0, 2.0))
    reported = json.loads(json.dumps(found.as_json()))
    assert reported["baseline"] == "base" and reported["same_text"] is False
    means = ["all", "fast", "2.5", "1000 / 1000", "2.00", "2.00x faster", "2.00-2.00", "0 of 4"]
    assert means in report_table(found).rows


def test_errors_are_counted_and_reported() -> None:
    base = FakePeer("base", lambda item: 1.0)
    broken = FakePeer("broken", lambda item: 1.0, error="HTTP 500: no")
    found = run_compare([base, broken], items(code=1), CompareSettings(rounds=2), "base", ignore_progress, {})
    cell = found.cells[1]
    assert (cell.errors, cell.speedup, cell.tokens_per_second, found.errors) == (2, None, None, 2)
    assert any("ERRORS, broken, code: HTTP 500: no (2 times)" in line for line in remarks(found))


def test_a_stop_leaves_what_there_is() -> None:
    base = FakePeer("base", lambda item: 1.0)
    base.stop_after = 4
    found = run_compare([base], items(code=2), CompareSettings(rounds=3), "base", ignore_progress, {})
    assert isinstance(found.stopped, KeyboardInterrupt) and found.cells[0].prompts == 2
    base = FakePeer("base", lambda item: 1.0)
    base.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        run_compare([base], items(code=2), CompareSettings(), "base", ignore_progress, {})


# As it is typed


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = program.main(["bench", *words])
    except SystemExit as leaving:
        code = int(str(leaving.code))
    return code, *capsys.readouterr()


def test_our_server_with_and_without_drafts_next_to_transformers(
    capsys: pytest.CaptureFixture[str], server: ServerProcess, folder: Path, tmp_path: Path
) -> None:
    out, page = tmp_path / "c.json", tmp_path / "c.html"
    words = [
        "compare",
        f"off={server.url}?speculative=false",
        f"on={server.url}",
        "transformers",
        "transformers:lookup",
    ]
    words += ["--model", str(folder), "--threads", "1", "--tasks", "chat,edit", "--per-task", "1", "--max-tokens", "24"]
    code, said, _ = command(capsys, *words, "--rounds", "2", "--out", str(out), "--html", str(page))
    assert code == 0
    reported = json.loads(out.read_text())
    cells = {(cell["task"], cell["arm"]): cell for cell in reported["cells"]}
    assert set(cells) == {
        (t, a) for t in ("chat", "edit") for a in ("off", "on", "transformers", "transformers:lookup")
    }
    for (_, variant), cell in cells.items():
        assert cell["errors"] == 0 and cell["tokens_per_second"] > 0 and cell["first_token"]["p50"] > 0
        assert cell["same_text"] is True, "the same weights, greedy: everybody writes one text"
        assert (
            cell["accepted_per_step"] == 1.0 if variant in ("off", "transformers") else cell["accepted_per_step"] >= 1.0
        )
    assert reported["peers"]["on"]["kind"] == "foretell" and "transformers" in reported["peers"]["transformers"]["kind"]
    last = json.loads(said.splitlines()[-1])
    assert last["bench"] == "compare" and {row["arm"] for row in last["overall"]} == {variant for _, variant in cells}
    assert "Foretell bench: compare" in page.read_text()


def test_an_impossible_setting_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, message in [
        (["compare", "http://127.0.0.1:1"], "no server at 127.0.0.1:1"),
        (["compare", "ftp://host"], "is not an address"),
        (["compare", "transformers", "--workload", "gsm8k"], "is not shipped"),
        (
            ["compare", "transformers", "--workload", "trace", "--data", str(tmp_path / "none.jsonl")],
            "name the workload's file",
        ),
        (["compare", "transformers", "--per-task", "0"], "per_task: must be 1 or more"),
        (["compare", "transformers", "--rounds", "0"], "rounds: must be 1 or more"),
        (["compare", "--html", str(tmp_path)], "is a folder"),
    ]:
        code, _, err = command(capsys, *words)
        assert code == 2 and message in err and err.count("\n") == 1, (words, err)


def test_names_must_differ_and_the_baseline_be_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Script("vllm")) as url:
        code, _, err = command(capsys, "compare", url, url)
        assert code == 2 and "two have the name" in err
        code, _, err = command(capsys, "compare", f"a={url}", "--baseline", "b")
        assert code == 2 and "is not one of the peers" in err


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_a_missing_package_is_named(
    missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    target: Any = SimpleNamespace(checkpoint=SimpleNamespace(path=Path("model.gguf"), kind="gguf"))
    with pytest.raises(ForetellError, match=f"the package {missing}.* is not installed: pip install {missing}"):
        TransformersPeer(target, ["transformers"])


@pytest.mark.slow
@pytest.mark.weights
def test_the_built_in_model_is_compared_with_transformers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The documented command, which reads a GGUF file."""
    out = tmp_path / "compared.json"
    words = ["compare", "foretell:plain", "foretell", "transformers", "--quick", "--max-tokens", "8", "--tasks", "chat"]
    code, said, err = command(capsys, *words, "--out", str(out))
    assert code == 0, err
    reported = json.loads(out.read_text())
    assert {cell["arm"] for cell in reported["cells"]} == {"foretell:plain", "foretell", "transformers"}
    assert all(cell["errors"] == 0 and cell["tokens_per_second"] > 0 for cell in reported["cells"])
    assert json.loads(said.splitlines()[-1])["bench"] == "compare"
