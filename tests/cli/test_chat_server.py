"""foretell chat --url: a conversation with a server."""

from __future__ import annotations

import io
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import pytest

from foretell.cli.chat_backend import ServerAnswer
from foretell.cli.main import main
from tests.server.process import ServerProcess, write_server_folder
from tests.waiting import TIMEOUT

MODELS = {"data": [{"id": "some-model"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_server_folder(tmp_path_factory.mktemp("models") / "server")
    with ServerProcess(folder, "--api-key", "right") as process:
        yield process


class Stub(ThreadingHTTPServer):
    """A server with OpenAI's API that sends prepared lines."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.status, self.lines, self.bodies = 200, list[str](), list[dict[str, Any]]()
        self.on_sent: Callable[[IO[bytes]], None] = lambda connection: None  # called before the connection is closed

    def send(self, *events: dict[str, Any] | str) -> None:
        """Prepare the next answer."""
        self.lines = [f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in events]


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self._respond(json.dumps(MODELS))

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.bodies.append(json.loads(self.rfile.read(length)))
        self._respond("".join(self.server.lines))
        self.server.on_sent(self.rfile)

    def _respond(self, text: str) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        thread = threading.Thread(target=stub.serve_forever)
        thread.start()
        yield stub
        stub.shutdown()
        thread.join()


def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = main(["chat", *words])
    return code, *capsys.readouterr()


def delta(content: str, finish: str | None = None, **more: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content, **more}, "finish_reason": finish}]}


def test_a_server_of_ours_answers_a_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: ServerProcess, tmp_path: Path
) -> None:
    lines = f"Hello\nAgain\n/save {tmp_path}/chat.json\n"
    words = ["--url", server.url, "--api-key", "right", "--max-tokens", "5", "--ignore-eos", "--seed", "1"]
    code, out, err = chat(capsys, monkeypatch, lines, *words)
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert code == 0 and saved["model"] == "tiny"
    assert [each["role"] for each in saved["messages"]] == ["user", "assistant"] * 2
    answers = [each["content"] for each in saved["messages"] if each["role"] == "assistant"]
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert err.count("[cut at 5 tokens; --max-tokens raises it]\n5 tokens") == 2


def test_the_key_comes_from_the_environment_and_a_wrong_one_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: ServerProcess
) -> None:
    code, _, err = chat(capsys, monkeypatch, "Hi\n", "--url", server.url)
    assert (code, len(err.splitlines())) == (1, 1) and "give its key with --api-key" in err
    monkeypatch.setenv("FORETELL_API_KEY", "right")
    assert chat(capsys, monkeypatch, "Hi\n", "--url", f"{server.url}/v1/", "--max-tokens", "2")[0] == 0


def test_a_refused_message_is_reported_and_the_chat_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: ServerProcess
) -> None:
    lines = "Hi\n" + "word " * 2000 + "\nHi\n"
    words = ["--url", server.url, "--api-key", "right", "--max-tokens", "2", "--ignore-eos"]
    code, _, err = chat(capsys, monkeypatch, lines, *words)
    assert code == 0 and err.count("[cut at 2 tokens") == 2
    assert "(/reset starts a new conversation)" in err


def test_any_server_with_the_api_will_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    thinking = delta("", reasoning_content="Hm. ")
    stub.send(thinking, delta("Hel"), ": a comment", delta("lo\x07", "stop"), {"choices": [], "usage": None}, "[DONE]")
    stub.lines[2] = ": a comment\n\n"
    code, out, err = chat(capsys, monkeypatch, "Hi\nMore\n", "--url", stub.url, "--top-k", "5", "--system", "Be kind.")
    assert (code, out) == (0, "Hm. Hello\x07\n" * 2)
    assert err.count("unknown tokens") == 2, "it sends no usage"
    first, second = stub.bodies
    assert (first["model"], first["top_k"], first["stream"]) == ("some-model", 5, True)
    assert "temperature" not in first, "the server's own settings decide"
    said = [(each["role"], each["content"]) for each in second["messages"]]
    assert said[1:] == [("user", "Hi"), ("assistant", "Hello\x07"), ("user", "More")], "reasoning is not sent back"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "Hello␇" in chat(capsys, monkeypatch, "Hi\n", "--url", stub.url, "--model", "other")[1]
    assert stub.bodies[-1]["model"] == "other"


def test_draft_tokens_are_reported_where_the_server_counts_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    counted = {"usage": {"completion_tokens": 9}, "timings": {"draft_n": 8, "draft_n_accepted": 6}, "choices": []}
    stub.send(delta("Hello", "length"), counted, "[DONE]")
    _, _, err = chat(capsys, monkeypatch, "Hi\n", "--url", stub.url)
    assert "[cut at 9 tokens; --max-tokens raises it]\n9 tokens (6 of 8 draft tokens accepted)" in err


def test_the_speed_is_the_server_s_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    counted = {"usage": {"completion_tokens": 8}, "timings": {"predicted_per_second": 41.25}, "choices": []}
    stub.send(delta("Hello"), delta(" you", "stop"), counted, "[DONE]")
    assert "8 tokens, 41.2 tokens/s, first token" in chat(capsys, monkeypatch, "Hi\n", "--url", stub.url)[2]


@pytest.mark.parametrize(("tokens", "speed"), [(1, 1e6), (8, "fast"), (8, None)])
def test_a_speed_of_the_server_that_says_nothing_is_left_out(tokens: int, speed: float | str | None) -> None:
    answer = ServerAnswer(began=1.0)
    answer.add(delta("word"))
    answer.add({"usage": {"completion_tokens": tokens}, "timings": {"predicted_per_second": speed}, "choices": []})
    assert "tokens/s" not in answer.summary()


@pytest.mark.parametrize(
    ("chunks", "seconds", "shown"),
    [(1, 0.0, ""), (2, 5.0, ""), (8, 0.05, ""), (4, 2.0, ", 3.0 tokens/s"), (8, 0.5, ", 14.0 tokens/s")],
)
def test_a_speed_that_cannot_be_measured_is_left_out(chunks: int, seconds: float, shown: str) -> None:
    answer = ServerAnswer(began=1.0)
    for _ in range(chunks):
        answer.add(delta("word"))
    answer.add({"usage": {"completion_tokens": 8}, "choices": []})
    answer.first, answer.last = 2.0, 2.0 + seconds
    assert answer.summary() == f"8 tokens{shown}, first token after 1.00 s"


@pytest.mark.parametrize(
    ("status", "event", "message"),
    [
        (200, {"error": {"message": "out of luck"}}, "out of luck"),
        (200, {"error": "out of luck"}, "out of luck"),
        (200, "{", "sent a stream that is not JSON"),
        (503, "", "HTTP 503 from"),
    ],
)
def test_faults_of_a_server_are_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stub: Stub,
    status: int,
    event: dict[str, Any] | str,
    message: str,
) -> None:
    stub.send(event)
    stub.status = status
    words = ["--url", stub.url, *(["--model", "any"] if status != 200 else [])]
    code, _, err = chat(capsys, monkeypatch, "Hi\n", *words)
    assert code == 0 and message in err and len(err.splitlines()) == 1


def test_a_fault_in_an_answer_leaves_the_conversation_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    stub.send(delta("Hel"), {"error": {"message": "out of luck"}})
    code, out, _ = chat(capsys, monkeypatch, "Hi\nAgain\n", "--url", stub.url)
    assert (code, out) == (0, "Hel\nHel\n")
    assert [each["content"] for each in stub.bodies[-1]["messages"]] == ["Again"]


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    code, _, err = chat(capsys, monkeypatch, "Hi\n", "--url", "http://127.0.0.1:9")
    assert (code, err) == (
        1,
        "foretell: no server answers at http://127.0.0.1:9; start one with 'foretell serve --port 9'\n",
    )
    monkeypatch.setitem(MODELS, "data", [])
    code, _, err = chat(capsys, monkeypatch, "Hi\n", "--url", stub.url)
    assert (code, len(err.splitlines())) == (1, 1) and "lists no model; name one: --model NAME" in err


def test_only_a_plain_server_on_this_machine_is_hinted_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    for url in ("https://127.0.0.1:9", stub.url.replace("http:", "https:"), "http://127.0.0.2:9"):
        code, _, err = chat(capsys, monkeypatch, "Hi\n", "--url", url)
        assert (code, len(err.splitlines())) == (1, 1)
        assert err.startswith(f"foretell: no server answers at {url}: ") and "foretell serve" not in err
    _, _, err = chat(capsys, monkeypatch, "Hi\n", "--url", "http://localhost:9")
    assert err.endswith("; start one with 'foretell serve --port 9'\n")


def test_a_host_that_never_answers_is_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretell.cli.chat_backend.LIST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, _, err = chat(capsys, monkeypatch, "Hi\n", "--url", url)
    assert (code, len(err.splitlines())) == (1, 1)
    assert f"the server at {url} accepts connections but sent nothing within 0.1 s" in err


def test_ctrl_c_ends_the_request_and_keeps_what_had_arrived(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub: Stub, tmp_path: Path
) -> None:
    main_thread, add = threading.main_thread().ident, ServerAnswer.add
    arrived, closed = threading.Event(), threading.Event()
    assert main_thread is not None

    def noticed(answer: ServerAnswer, chunk: dict[str, Any]) -> str:
        text = add(answer, chunk)
        arrived.set()
        return text

    def press_and_wait(connection: IO[bytes]) -> None:
        arrived.wait(TIMEOUT)
        signal.pthread_kill(main_thread, signal.SIGINT)
        if connection.read(1) == b"":
            closed.set()

    monkeypatch.setattr(ServerAnswer, "add", noticed)
    stub.on_sent = press_and_wait
    stub.send(delta("Once upon"))
    code, _, err = chat(capsys, monkeypatch, f"Tell\n/save {tmp_path}/chat.json\n", "--url", stub.url)
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert code == 0 and "[stopped" in err
    assert [each["content"] for each in saved] == ["Tell", "Once upon"]
    assert closed.wait(TIMEOUT), "the server sees that the client has left"
