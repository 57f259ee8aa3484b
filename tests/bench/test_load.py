"""Load tests: closed-loop and Poisson clients, their results, and every way a response can fail."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest

from foretell.bench import load as bench_load
from foretell.bench import server_process as serving
from foretell.bench.http_client import Address, ClosedLoop, Poisson, StreamResult, stream_request
from foretell.bench.load import (
    LoadResult,
    LoadSlice,
    LoadVariant,
    cell_of,
    remarks,
    report_table,
    request_bodies,
    run_load,
    variants_of,
)
from foretell.bench.prompt import BenchPrompt
from foretell.bench.settings import LoadSettings
from foretell.cli import main as program
from foretell.errors import ForetellError, RequestError
from tests.server.process import ServerProcess
from tests.waiting import TIMEOUT

from .fakes import ignore_progress, items

HERE = Address("127.0.0.1", 1)
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
WORD = {"choices": [{"delta": {"content": "word "}}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


def events(*found: Mapping[str, Any], done: bool = True) -> bytes:
    reported = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in found]
    return b"".join([*reported, b"data: [DONE]\n\n" if done else b""])


def chunked(body: bytes, size: int) -> bytes:
    """A reply in chunks of so many bytes, wherever that cuts it."""
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def answered(reply: bytes, timeout: float = TIMEOUT) -> tuple[StreamResult, bytes]:
    """What a caller makes of a reply, and what it had sent."""
    sent: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(await reader.readuntil(b"}"))
        writer.write(reply)
        try:
            if not reply:  # say nothing until the caller has gone
                await reader.read()
        finally:
            writer.close()

    async def both() -> StreamResult:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port: int = server.sockets[0].getsockname()[1]
            ticks = iter(range(100))
            here = Address("127.0.0.1", port, path="/proxy", key="secret")
            return await stream_request(here, {"stream": True}, timeout, lambda: float(next(ticks)))

    return asyncio.run(both()), sent[0]


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_stream_is_read_however_it_is_cut(size: int) -> None:
    answer, sent = answered(chunked(events(ROLE, WORD, WORD, WORD, USAGE), size))
    assert answer == StreamResult(tokens=3, first=1.0, last=3.0), "the role alone is no word"
    assert answer.seconds_per_token == 1.0
    assert sent.startswith(b"POST /proxy/v1/chat/completions HTTP/1.1\r\n") and b"Bearer secret" in sent


def test_a_reply_without_chunks_is_read_to_its_end() -> None:
    answer, _ = answered(b"HTTP/1.1 200 OK\r\n\r\n" + events(WORD, USAGE))
    assert answer.error is None and answer.tokens == 3


def test_an_answer_without_words_has_an_end() -> None:
    answer, _ = answered(chunked(events(ROLE, {"usage": {"completion_tokens": 1}}), 99))
    assert answer == StreamResult(tokens=1, first=None, last=1.0) and answer.seconds_per_token is None


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b'HTTP/1.1 429 Too Many\r\n\r\n{"error": {"message": "later"}}', "HTTP 429: later"),
        (b"HTTP/1.1 502 Bad\r\n\r\nno gateway", "HTTP 502: no gateway"),
        (chunked(events(WORD, {"error": {"message": "it failed"}}), 50), "it failed"),
        (chunked(events(WORD, USAGE, done=False), 50), "the stream ended early"),
        (chunked(events(WORD), 50)[:-30], "bytes read"),
        (b"220 smtp ready\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {\n\n", "Expecting property name"),
    ],
)
def test_whatever_goes_wrong_is_an_error(reply: bytes, error: str) -> None:
    answer, _ = answered(reply)
    assert answer.error is not None and error in answer.error and answer.seconds_per_token is None


def test_silence_and_a_closed_door_are_errors() -> None:
    silent, _ = answered(b"", timeout=0.05)
    assert silent.error == "no response within 0.05 s"
    closed = asyncio.run(stream_request(HERE, {}))
    assert closed.error is not None


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("https://host/api/v1/", Address("host", 443, tls=True, path="/api")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.parse(url) == address
    for wrong in ("ftp://host", "http://"):
        with pytest.raises(RequestError, match="is not an address"):
            Address.parse(wrong)


# When callers come


class CountingServer:
    """Answers after a moment and counts who stands before it."""

    def __init__(self, error: str | None = None) -> None:
        self.now = self.most = self.total = 0
        self.error = error

    async def __call__(self, body: Mapping[str, Any]) -> StreamResult:
        self.now, self.total = self.now + 1, self.total + 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        return StreamResult(2, 0.1, 0.2, self.error)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances only by sleeping."""
    now, sleep = [0.0], asyncio.sleep

    async def pass_by(seconds: float) -> None:
        now[0] += seconds
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pass_by)
    monkeypatch.setattr("foretell.bench.http_client.perf_counter", lambda: now[0])


@pytest.mark.usefixtures("clock")
def test_a_closed_loop_keeps_so_many_callers() -> None:
    server = CountingServer()
    answers = asyncio.run(ClosedLoop(5).run(server, repeat({}), 0.1, ""))
    assert server.most == 5 and server.total == len(answers) > 5 and server.now == 0


@pytest.mark.usefixtures("clock")
def test_an_error_is_not_asked_again_at_once() -> None:
    server = CountingServer("no")
    asyncio.run(ClosedLoop(1).run(server, repeat({}), 0.1, ""))
    assert server.total == 1


@pytest.mark.usefixtures("clock")
def test_poisson_callers_come_at_their_rate_whatever_the_answers() -> None:
    level = Poisson(100.0)
    times = level.times(50.0, "a")
    assert len(times) == pytest.approx(5000, rel=0.05) and times == sorted(times) == level.times(50.0, "a")
    assert times != level.times(50.0, "b")
    server = CountingServer()
    answers = asyncio.run(level.run(server, repeat({}), 0.1, "a"))
    assert len(answers) == server.total == len(level.times(0.1, "a")) > 0


def test_loads_that_cannot_be_are_refused() -> None:
    for make in (lambda: ClosedLoop(0), lambda: Poisson(0.0)):
        with pytest.raises(RequestError):
            make()
    for wrong in ({"seconds": 0.0}, {"turns": 0}, {"max_tokens": 0}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            replace(LoadSettings(()), **wrong)


# What is asked


def test_variants_send_the_same_requests_and_find_none_cached() -> None:
    off, auto = variants_of(HERE, None)
    settings = LoadSettings((), max_tokens=9, temperature=0.5)
    talk = [BenchPrompt(f"t{i}", "chat", ({"role": "user", "content": str(i)},), max_tokens=i + 8) for i in range(3)]
    ours, theirs = (
        list(islice(request_bodies(talk, settings, variant, "turn 0", "run"), 6)) for variant in (off, auto)
    )
    assert [body["messages"] for body in ours] == [body["messages"] for body in theirs]
    assert [body["seed"] for body in ours] == [body["seed"] for body in theirs]
    assert len({body["seed"] for body in ours}) == 6, "a repeated request has another seed"
    assert len({body["cache_salt"] for body in ours + theirs}) == 4, "one for each arm and pass"
    assert all(body["speculative"] is False for body in ours) and all("speculative" not in body for body in theirs)
    assert {body["max_tokens"] for body in ours} == {8, 9} and ours[0]["temperature"] == 0.5
    other = [body["messages"] for body in islice(request_bodies(talk * 9, settings, off, "turn 1", "run"), 27)]
    assert other != [body["messages"] for body in islice(request_bodies(talk * 9, settings, off, "turn 0", "run"), 27)]


def test_a_fixed_length_is_a_server_of_its_own() -> None:
    there = replace(HERE, port=2)
    assert [(variant.name, variant.address) for variant in variants_of(HERE, there)] == [
        ("off", HERE),
        ("auto", HERE),
        ("on", there),
    ]


# What it comes to


def slices(*tokens: int, first: float = 0.1, a_token: float = 0.01) -> list[LoadSlice]:
    return [LoadSlice([StreamResult(count, first, first + a_token * (count - 1))], 10.0) for count in tokens]


def test_a_cell_has_its_times_and_its_ratio() -> None:
    plain, ours = slices(100, 100, 100), slices(150, 90, 140, first=0.2, a_token=0.02)
    ours[1] = LoadSlice([*ours[1].results, StreamResult(error="HTTP 429: later")], 10.0)
    cell = cell_of(ClosedLoop(4), "auto", ours, plain)
    assert (cell.requests, cell.errors, cell.reasons) == (4, 1, {"HTTP 429: later": 1})
    assert cell.tokens_per_second == pytest.approx(380 / 30)
    assert cell.speedup == pytest.approx((1.5 * 0.9 * 1.4) ** (1 / 3)), "the centre of its interval"
    assert cell.speedup_interval is not None and cell.speedup_interval == pytest.approx((0.621, 2.461), abs=1e-3)
    assert cell.first_token is not None and cell.first_token.p50 == cell.first_token.p99 == 0.2
    assert cell.per_token is not None and cell.per_token.p50 == pytest.approx(0.02)
    assert cell_of(Poisson(2.0), "auto", ours, plain).speedup == pytest.approx(0.5), "there the pace of one text counts"
    assert cell_of(ClosedLoop(4), "auto", ours, ()).speedup is None


def result_of(text: str, key: str, accepted: int, rule: str = "match") -> StreamResult:
    timings = {"predicted_n": 8, "draft_n": 9, "draft_n_accepted": accepted}
    return StreamResult(
        8, 0.1, 0.2, text=text, extra={"timings": timings, "speculation": {"rule": rule}}, request_key=key
    )


def test_equal_requests_get_equal_outputs() -> None:
    plain = [LoadSlice([result_of("one", "1", 0), result_of("two", "2", 0)], 1.0)]
    for answers, same in [
        ([result_of("one", "1", 4), result_of("new", "3", 4)], True),
        ([result_of("one", "1", 4), result_of("other", "2", 4)], False),
        ([result_of("other", "2", 4, "rejection")], None),
        ([result_of("new", "3", 4)], None),
    ]:
        cell = cell_of(ClosedLoop(1), "auto", [LoadSlice(answers, 1.0)], plain)
        assert cell.same_text is same and cell.accepted_per_step == 2.0
    wrong = LoadResult({}, (replace(cell, same_text=False),))
    assert not wrong.same_text and any("NOT THE SAME TEXT" in line for line in remarks(wrong))


def faked(monkeypatch: pytest.MonkeyPatch, paces: Mapping[str, int], stop_after: int = 99) -> list[tuple[str, str]]:
    log: list[tuple[str, str]] = []

    def fake(level: object, variant: LoadVariant, params: Iterator[Any], seconds: float, seed: str) -> LoadSlice:
        if len(log) == stop_after:
            raise KeyboardInterrupt
        assert seconds == 2.0
        log.append((str(level), variant.name))
        return slices(paces[variant.name])[0]

    monkeypatch.setattr(bench_load, "run_slice", fake)
    return log


def test_variants_take_turns_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    log = faked(monkeypatch, {"off": 100, "auto": 190, "on": 200})
    settings = LoadSettings((ClosedLoop(1), ClosedLoop(4)), seconds=18, turns=3)
    found = run_load(variants_of(HERE, HERE), items(chat=1), settings, ignore_progress, {"model": "m"})
    order = [variant for level, variant in log if level == "1 at once"]
    assert order == ["off", "auto", "on", "auto", "on", "off", "on", "off", "auto"] and len(log) == 18
    reported = json.loads(json.dumps(found.as_json()))
    assert reported["auto_over_better"] == {"1 at once": pytest.approx(0.95), "4 at once": pytest.approx(0.95)}
    assert reported["errors"] == 0 and reported["complete"] is True and len(reported["cells"]) == 6
    overall = {row["arm"]: row for row in reported["overall"]}
    assert overall["auto"]["speedup"] == pytest.approx(1.9) and overall["auto"]["cells"] == 2
    assert overall["auto"]["speedup_interval"] == [pytest.approx(1.9)] * 2
    assert {"accepted_per_step", "same_text"} < set(overall["on"]) and "draws" not in reported["cells"][0]
    latencies, speedup = ["100.0 / 100.0", "10.0 / 10.0"], ["1.90x faster", "1.90-1.90"]
    assert ["4 at once", "auto", "3", "19.0", *latencies, *speedup, "-", "-"] in report_table(found).rows
    assert not any("--fixed-url" in line for line in remarks(found))


def test_a_stop_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, {"off": 100, "auto": 150}, stop_after=3)
    settings = LoadSettings((ClosedLoop(1),), seconds=8, turns=2)
    found = run_load(variants_of(HERE, None), items(chat=1), settings, ignore_progress, {})
    assert isinstance(found.stopped, KeyboardInterrupt)
    assert {cell.variant: (cell.requests, cell.speedup) for cell in found.cells} == {
        "off": (1, 1.0),
        "auto": (2, pytest.approx(1.5)),
    }
    said = "\n".join(remarks(found))
    assert "Stopped early" in said and "--fixed-url" in said


@pytest.mark.parametrize("finished", [0, 1])
def test_a_stop_in_the_first_runs_of_a_variant_is_no_fault(finished: int, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, {"off": 100, "auto": 150}, stop_after=finished)
    settings = LoadSettings((ClosedLoop(1),), seconds=8, turns=2)
    if not finished:
        with pytest.raises(KeyboardInterrupt):
            run_load(variants_of(HERE, None), items(chat=1), settings, ignore_progress, {})
        return
    found = run_load(variants_of(HERE, None), items(chat=1), settings, ignore_progress, {})
    assert [cell.variant for cell in found.cells] == ["off"] and isinstance(found.stopped, KeyboardInterrupt)


# Against a real server


def command(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> tuple[int, str, str]:
    code = program.main(["bench", "load", *words])
    return code, *capsys.readouterr()


SHORT = ("--tasks", "chat,story", "--max-tokens", "8", "--turns", "1")


def test_a_server_under_load(capsys: pytest.CaptureFixture[str], server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    before = server.metrics()["foretell:generation_tokens_total"]
    words = ["--base-url", f"{server.url}/v1", "--concurrency", "1,4", "--rate", "5", "--seconds", "0.8", *SHORT]
    code, out, err = command(capsys, [*words, "--json", "--out", str(file)])
    reported = json.loads(out)
    assert code == 0 and reported == json.loads(file.read_text())
    loads = [(cell["load"], cell["arm"]) for cell in reported["cells"]]
    assert loads == [
        (load, variant) for load in ("1 at once", "4 at once", "5 a second") for variant in ("off", "auto")
    ]
    for cell in reported["cells"]:
        assert cell["errors"] == 0 and cell["requests"] >= 1 and 0 < cell["tokens"] <= 8 * cell["requests"]
        assert cell["tokens_per_second"] > 0 and cell["speedup"] > 0
        assert cell["same_text"] in (None, True) and cell["accepted_per_step"] >= 1
        assert 0 < cell["first_token"]["p50"] <= cell["first_token"]["p99"] and cell["per_token"]["p50"] > 0
    counted = server.metrics()["foretell:generation_tokens_total"] - before
    warm_up = counted - sum(cell["tokens"] for cell in reported["cells"])
    assert 2 <= warm_up <= 16, "every token was counted but those of the first request to each arm"
    assert "off and auto are compared" in " ".join(err.split())
    assert reported["machine"]["cores"] and reported["date"] and reported["workload"] == "own"
    assert any(cell["same_text"] for cell in reported["cells"] if cell["arm"] == "auto"), "outputs were compared"


def test_a_trace_of_ones_own_loads_a_server(
    capsys: pytest.CaptureFixture[str], server: ServerProcess, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "The quick brown fox", "max_tokens": 6, "ignore_eos": true, "temperature": 0}\n')
    words = [server.url, "--concurrency", "1", "--seconds", "0.2", "--turns", "1", "--json"]
    code, out, _ = command(capsys, [*words, "--workload", "trace", "--data", str(trace)])
    reported = json.loads(out)
    assert code == 0 and reported["workload"] == "trace" and reported["same_text"] is True
    assert all(cell["tokens"] == 6 * cell["requests"] > 0 for cell in reported["cells"]), "all it said was asked for"


def test_an_error_fails_the_run(
    capsys: pytest.CaptureFixture[str], server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--base-url", server.url, "--concurrency", "2", "--seconds", "0.2", "--temperature", "-1", *SHORT]
    code, _, err = command(capsys, words)
    assert code == 2 and "does not serve: HTTP 400: temperature" in err and "; request what it serves" in err
    monkeypatch.setattr("foretell.bench.load.check_servers", lambda *_: None)
    code, out, _ = command(capsys, words)
    assert code == 1 and "ERRORS, 2 at once, auto: HTTP 400: temperature" in out


# A server of its own

STARTED = """
import signal, sys
print("foretell: {url} serves tiny", sys.argv[1:], flush=True)
signal.sigwait([signal.SIGTERM])
"""


def test_a_server_that_was_started_is_stopped(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    code = STARTED.replace("{url}", server.url)
    monkeypatch.setattr(serving, "COMMAND", (sys.executable, "-c", code))
    started: list[subprocess.Popen[str]] = []

    class Seen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Seen)
    with serving.start_server({"model": "m", "threads": 1}) as own:
        assert own == (server.url, started[0].pid) and started[0].poll() is None
    assert started[0].poll() is not None
    assert started[0].args[-4:] == ["--port", "0", "--model=m", "--threads=1"]  # type: ignore[index]


def test_a_server_that_does_not_start_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit('foretell: there is no model m')"
    monkeypatch.setattr(serving, "COMMAND", (sys.executable, "-c", code))
    with pytest.raises(ForetellError, match="did not start: there is no model m"), serving.start_server({}):
        raise AssertionError("it started")


@pytest.mark.slow
def test_servers_are_started_where_none_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = ["--model", str(folder), "--threads", "1", "--concurrency", "2", "--seconds", "0.6", *SHORT]
    code, out, _ = command(capsys, words)
    assert code == 0
    assert {cell["arm"] for cell in json.loads(out.splitlines()[-1])["cells"]} == {"off", "auto", "on"}


def test_settings_as_flags() -> None:
    settings = {"model": "m", "max_num_seqs": 4, "prefix_cache": False, "access_log": True, "dtype": None}
    assert serving.flags(settings) == ["--model=m", "--max-num-seqs=4", "--no-prefix-cache", "--access-log"]


def test_what_cannot_be_is_refused_before_a_server_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.bench.server_process.subprocess.Popen", None)
    for words, message in [
        (["--base-url", "ftp://host"], "is not an address"),
        (["127.0.0.1:1", "--base-url", "http://127.0.0.1:2"], "give one URL"),
        (["http://127.0.0.1:1"], "; start the server, or correct the address"),
        (["--base-url", "http://127.0.0.1:1"], "; start the server, or correct the address"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m"], "is a server setting"),
        (["--fixed-url", "http://127.0.0.1:1"], "needs --base-url"),
        (["--concurrency", "0"], "concurrency: must be 1 or more"),
        (["--rate", "0"], "rate: must be above 0"),
        (["--tasks", "cha"], "did you mean 'chat'"),
    ]:
        code, _, err = command(capsys, words)
        assert code == 2 and message in err, words
