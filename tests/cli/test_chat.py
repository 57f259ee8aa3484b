"""foretell chat: commands, history, limits, and a terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from foretell import LLM
from foretell.cli.chat import COMMANDS
from foretell.cli.chat_backend import LocalBackend
from foretell.cli.chat_input import line_reader
from foretell.cli.main import main
from tests.cli.terminal import Terminal
from tests.folder import Shape, write_tiny_folder

PASTE = "\x1b[200~{}\x1b[201~"  # what a terminal sends for a paste
UP, LEFT, CTRL_C, CTRL_D, ALT_ENTER = "\x1b[A", "\x1b[D", "\x03", "\x04", "\x1b\r"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "chat", shape=Shape(context=512))


def chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, *words: str
) -> tuple[int, str, str]:
    """Run a chat whose lines come from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = main(["chat", *words])
    return code, *capsys.readouterr()


def test_commands_are_run_and_unknown_ones_refused_with_the_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    lines = "/help\n/hepl\n/reset\n\n /etc is a folder\n/exit now\nnot read\n"
    code, _, err = chat(capsys, monkeypatch, lines, str(model), "--max-tokens", "3")
    assert code == 0
    assert all(f"{name} " in err for name in COMMANDS)
    assert f"there is no command /hepl; known: {', '.join(COMMANDS)}" in err
    assert "new conversation" in err
    assert err.count("tokens in") == 1, "only the line with a space before the slash is a message"


def test_a_conversation_is_saved_once_and_not_over_other_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    other.write_text("kept")
    lines = f"Hello\n/save {mine}\nAgain\n/save {mine}\n/save {other}\n/save\n/save {tmp_path}/none/x\nEnd\n"
    words = ["--model", str(model), "--max-tokens", "3", "--system", "Be brief.", "--ignore-eos"]
    code, out, err = chat(capsys, monkeypatch, lines, *words)
    saved = json.loads(mine.read_text())
    assert code == 0 and saved["model"] == str(model)
    assert [each["role"] for each in saved["messages"]] == ["system", *["user", "assistant"] * 2]
    assert [each["content"] for each in saved["messages"]][:2] == ["Be brief.", "Hello"]
    assert other.read_text() == "kept" and f"{other} exists; name a new file" in err
    assert "/save needs a file" in err and "there is no folder" in err
    assert err.count("tokens in") == 3, "a refused command does not end the chat"


def test_sampling_is_changed_within_a_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    lines = "/set\nHi\n/set max-tokens 2\n/set temprature 1\n/set top_p 7\n/set seed x\n/set n 2\n/set stop\nHi\n/set\n"
    _, _, err = chat(capsys, monkeypatch, lines, str(model), "--max-tokens", "4", "--ignore-eos")
    assert "\n4 tokens in" in err and "\n2 tokens in" in err
    assert err.splitlines()[0] == "max_tokens 4, ignore_eos True" and err.splitlines()[-1].startswith("max_tokens 2,")
    assert "temprature: cannot be set in a chat; did you mean 'temperature'?" in err
    assert "top_p: must be above 0 and at most 1, not 7.0" in err
    assert "seed: must be an integer, not 'x'" in err
    assert "\nforetell: n: cannot be set" in err and "/set needs a name and a value" in err


def test_a_word_says_why_an_answer_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, tiny_folder: Path
) -> None:
    _, out, err = chat(capsys, monkeypatch, "Hi\n", str(model), "--max-tokens", "5", "--ignore-eos")
    assert "[cut at 5 tokens; --max-tokens raises it]" in err and "[cut" not in out
    _, _, err = chat(capsys, monkeypatch, "Hi\n", str(tiny_folder), "--ignore-eos")
    assert "tokens: the context is full]" in err, "its context is shorter than the default limit"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--n", "3"], "n: a chat has one answer a turn"),
        (["--logprobs", "2"], "logprobs: are not shown in a chat"),
        (["--prompt-logprobs", "2"], "prompt_logprobs: are not shown in a chat"),
        (["--api-key", "k"], "api_key: is for a server; name it with --url"),
        (["--url", "localhost:8000"], "is not an address such as"),
        (["--url", "http://localhost:99999"], "is not an address such as"),
        (["--url", "http://localhost:1", "--drafter", "ngram"], "drafter: is a setting of the server"),
        (["--url", "http://localhost:1", "--threads", "1"], "threads: is a setting of the server"),
        (["--url", "http://localhost:1", "--api-key", "kéy"], "api_key: has characters"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_options_that_do_not_fit_a_chat_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    code, out, err = chat(capsys, monkeypatch, "Hi\n", *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_binary_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, errors: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff b\n"), encoding="utf-8", errors=errors))
    assert main(["chat", "no-such-model"]) == 2, "found before the model is looked for"
    assert capsys.readouterr().err.splitlines() == [
        "foretell: prompt: standard input is not UTF-8; convert it, such as with iconv"
    ]


def test_help_offers_no_option_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    out = capsys.readouterr().out
    assert "--url" in out and "--n " not in out and "logprobs" not in out


def test_the_banner_names_the_models_own_sampling(tiny_folder: Path) -> None:
    backend = LocalBackend(LLM(tiny_folder, drafter="ngram", quiet=True), show=False)
    assert backend.banner({}).endswith("drafters: ngram, sampling: temperature 0.9, top_k 40")
    assert backend.banner({"temperature": 0.5, "top_p": 0.8}).endswith("temperature 0.5, top_p 0.8, top_k 40")
    assert backend.banner({"temperature": 0.0}).endswith("sampling: greedy")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    """Keys for the editor, as a terminal sends them."""
    monkeypatch.setattr("foretell.cli.chat_input.on_terminal", lambda: True)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


def test_lines_are_edited_recalled_and_pasted(keys: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    read = line_reader(COMMANDS, keep_history=True)
    for typed, line in (
        ("Helo" + LEFT + "l\r", "Hello"),
        (UP + "!\r", "Hello!"),
        ("not sent" + CTRL_C + "sent\r", "sent"),
        (PASTE.format("two\nlines") + "\r", "two\nlines"),
        ("first" + ALT_ENTER + "second\r", "first\nsecond"),
        (CTRL_D, None),
    ):
        keys.send_text(typed)
        assert read() == line
    history = tmp_path / "home" / "chat_history"
    assert "+Hello!\n" in history.read_text() and history.stat().st_mode & 0o77 == 0
    keys.send_text(UP + "\r")
    assert line_reader(COMMANDS, keep_history=True)() == "first\nsecond", "the next chat has the history"


def test_the_history_stays_in_memory_on_request_or_where_it_cannot_be_written(
    keys: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    keys.send_text("secret\r")
    assert line_reader(COMMANDS, keep_history=False)() == "secret"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "chat_history").mkdir()
    read = line_reader(COMMANDS, keep_history=True)
    assert "chat_history: Is a directory" in capsys.readouterr().err
    for typed in ("Hello\r", UP + "\r"):
        keys.send_text(typed)
        assert read() == "Hello"


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(tmp_path: Path) -> None:
    roomy = write_tiny_folder(tmp_path / "roomy", shape=Shape(context=30_000))
    words = ["chat", str(roomy), "--max-tokens", "20000", "--ignore-eos", "--drafter", "none", "--no-show"]
    with Terminal(*words, home=tmp_path) as terminal:
        assert "sampling: temperature 0.9, top_k 40" in terminal.wait_for("/help lists commands, Ctrl-D leaves")
        terminal.type("Go on for ever\r")
        terminal.wait_for("ever")
        terminal.wait_for_more(40)  # the answer has started
        terminal.interrupt()
        terminal.wait_for("[stopped after")
        terminal.wait_for("first token after")
        terminal.type("/se\t")
        terminal.wait_for("t")  # completed
        terminal.type(" max_tokens 3\r", at_prompt=False)
        terminal.wait_for("max_tokens 3,")
        terminal.type("And now\r")
        terminal.wait_for("3 tokens in")
        assert terminal.leave() == 0
