"""The command line: output, errors and exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foretell import LLM, SamplingParams, __version__
from foretell.cli import generate
from foretell.cli.main import main
from foretell.cli.stream_output import COLOURS, RESET
from tests.folder import write_tiny_folder
from tests.waiting import TIMEOUT

CODES = re.compile(r"\x1b\[[\d;]+m")
PROMPT = "The quick brown fox jumps over the lazy dog. The quick"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(list(words))
    except SystemExit as leaving:
        code = int(str(leaving.code))
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_prints_one_json_object(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    words = ["--model", str(tiny_folder), "--json", "--max-tokens", "20", "--temperature", "0"]
    code, out, _ = run(capsys, "generate", PROMPT, *words)
    result = json.loads(out)
    assert code == 0
    assert len(result["token_ids"]) == result["usage"]["completion_tokens"] == len(result["speculation"]["origins"])
    assert result["finish_reason"] in ("stop", "length")
    assert result["usage"]["total_tokens"] == result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"]
    assert set(result["timings"]) >= {"first_token_s", "total_s", "tokens_per_second"}
    _, plain, _ = run(capsys, "generate", PROMPT, *words, "--drafter", "none")
    other = json.loads(plain)
    assert (other["text"], other["token_ids"]) == (result["text"], result["token_ids"])
    assert other["speculation"]["steps"] == len(other["token_ids"])


def test_generate_streams_text_and_a_summary(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    code, out, err = run(capsys, "generate", PROMPT, "--model", str(tiny_folder), "--max-tokens", "5", "--seed", "1")
    assert code == 0
    assert out.strip()
    assert "5 tokens in" in err
    assert "\x1b" not in out, "no colours where it is not a terminal"


def test_raw_leaves_the_chat_template_out(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    words = ["--model", str(tiny_folder), "--json", "--max-tokens", "3"]
    templated = json.loads(run(capsys, "generate", PROMPT, *words)[1])
    raw = json.loads(run(capsys, "generate", PROMPT, *words, "--raw")[1])
    assert raw["usage"]["prompt_tokens"] < templated["usage"]["prompt_tokens"]


def test_out_writes_a_file_and_leaves_nothing_else(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "result.json"
    run(capsys, "generate", PROMPT, "--model", str(tiny_folder), "--max-tokens", "3", "--out", str(target))
    assert json.loads(target.read_text())["finish_reason"] == "length"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_several_choices_and_stops(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    words = ["--model", str(tiny_folder), "--json", "--max-tokens", "9", "--n", "2", "--seed", "3"]
    words += ["--temperature", "1"]
    result = json.loads(run(capsys, "generate", PROMPT, *words, "--stop", "q", "--stop", "zz")[1])
    assert len(result["outputs"]) == 2
    assert all("q" not in each["text"] for each in result["outputs"])


def test_standard_input_is_read_for_a_dash(tiny_folder: Path) -> None:
    words = ["generate", "-", "--model", str(tiny_folder), "--max-tokens", "4", "--json", "--temperature", "0"]
    piped = program(*words, text=PROMPT)
    direct = program("generate", PROMPT, *words[2:])
    assert json.loads(piped.stdout)["token_ids"] == json.loads(direct.stdout)["token_ids"]


def test_chat_keeps_the_conversation(tiny_folder: Path) -> None:
    done = program("chat", "--model", str(tiny_folder), "--max-tokens", "4", text="Hello\nAgain\n/reset\nHi\n/exit\n")
    assert done.returncode == 0
    assert done.stderr.count("tokens in") == 3
    too_long = program("chat", "--model", str(tiny_folder), "--max-tokens", "4", text="word " * 200 + "\nHi\n")
    assert "prompt: has" in too_long.stderr
    assert too_long.stderr.count("tokens in") == 1, "the program goes on after a question that does not fit"


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    roomy = write_tiny_folder(tmp_path / "roomy")
    config = json.loads((roomy / "config.json").read_text())
    (roomy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 30_000}))
    words = ["chat", "--model", str(roomy), "--max-tokens", "20000", "--ignore-eos", "--drafter", "none"]
    command = [sys.executable, "-u", "-m", "foretell", *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as child:  # type: ignore[call-overload]
        child.stdin.write(b"Go on for ever\n")
        child.stdin.flush()
        child.stdout.read(40)  # the answer has started
        child.send_signal(signal.SIGINT)
        child.stdin.write(b"/exit\n")
        child.stdin.flush()
        out, err = child.communicate(timeout=4 * TIMEOUT)
    assert child.returncode == 0
    assert b"[stopped after" in err
    assert err.count(b"tokens in") == 1


def program(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "foretell", *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=4 * TIMEOUT)


def test_a_terminal_shows_drafters_in_colour(tiny_folder: Path) -> None:
    words = ["generate", PROMPT * 2, "--raw", "--show", "--model", str(tiny_folder), "--max-tokens", "40"]
    words += ["--temperature", "0", "--ignore-eos", "--prompt-lookup-min", "1", "--num-speculative-tokens", "4"]
    coloured = in_terminal(*words)
    assert any(colour in coloured for colour in COLOURS)
    assert "\x1b" not in in_terminal(*words, env={"NO_COLOR": "1"})
    assert any(colour in in_terminal(*words, env={"NO_COLOR": ""}) for colour in COLOURS), "empty is as good as unset"


GUESSED = ["--max-tokens", "40", "--temperature", "0", "--ignore-eos", "--drafter", "ngram"]
GUESSED += ["--prompt-lookup-min", "1", "--num-speculative-tokens", "4"]


def test_a_chat_is_coloured_unless_disabled(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["chat", "--model", str(tiny_folder), *GUESSED]
    coloured = in_terminal(*words, text="a a a a a a\n")
    assert COLOURS[0] in coloured
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdin", io.StringIO("a a a a a a\n"))
    _, plain, _ = run(capsys, *words, "--no-show")
    assert "\x1b" not in plain and CODES.sub("", coloured).split() == plain.split() != []


def test_complete_outputs_are_shown_like_a_stream(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    words = ["generate", "a a a a a a", "--show", "--model", str(tiny_folder), *GUESSED]
    _, streamed, legend = run(capsys, *words)
    assert COLOURS[0] in streamed
    _, filed, legend_text = run(capsys, *words, "--out", str(tmp_path / "out.json"))
    assert filed.replace(RESET + COLOURS[0], "") == streamed.replace(RESET + COLOURS[0], "")
    assert "accepted draft tokens" in legend_text and legend_text.splitlines()[-1] == legend.splitlines()[-1]
    assert "\x1b" not in (tmp_path / "out.json").read_text(), "a file has the text as it is"
    _, several, _ = run(capsys, *words, "--n", "2")
    assert COLOURS[0] in several and several.startswith(filed.rstrip("\n"))


def test_control_characters_are_replaced_in_complete_outputs(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generate with a model that only outputs terminal control codes; a pipe gets them unchanged."""
    llm = LLM(tiny_folder, quiet=True)
    escape = llm.tokenizer.encode("\x1b", add_special=False)
    params = SamplingParams(max_tokens=3, n=2, allowed_token_ids=escape)
    for terminal, shown in ((True, "␛␛␛\n\n␛␛␛\n"), (False, "\x1b\x1b\x1b\n\n\x1b\x1b\x1b\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        generate.print_outputs(llm, llm.generate([PROMPT], params)[0], params, show=False)
        assert capsys.readouterr().out == shown


def in_terminal(*words: str, env: dict[str, str] | None = None, text: str | None = None) -> str:
    """Return what a program writes to a terminal, with standard input from a pipe."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "foretell", *words]
    there = {**os.environ, "TERM": "xterm", **(env or {})}
    pipe = None if text is None else subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=follower, stderr=subprocess.DEVNULL, env=there, text=True
    ) as child:
        os.close(follower)
        if child.stdin is not None and text is not None:
            child.stdin.write(text)
            child.stdin.close()
        seen = b""
        try:
            while chunk := os.read(leader, 4096):
                seen += chunk
        except OSError:  # raised when the other end of the terminal is closed
            pass
    os.close(leader)
    return seen.decode()


WRONG: list[tuple[list[str], int, str]] = [
    (["generate", ""], 2, "prompt: is empty"),
    (["generate", "hi", "--temperature", "nan"], 2, "temperature"),
    (["generate", "hi", "--temperature", "-1"], 2, "temperature"),
    (["generate", "hi", "--temperature", "warm"], 2, "temperature"),
    (["generate", "hi", "--max-tokens", "0"], 2, "max_tokens"),
    (["generate", "hi", "--max-tokens", "100000"], 2, "ask for"),
    (["generate", "word " * 400], 2, "takes at most 127"),
    (["generate", "hi", "--drafter", "ngrm"], 2, "did you mean 'ngram'"),
    (["generate", "hi", "--speculative-config", "{"], 2, "is not JSON"),
    (["generate", "hi", "--speculative-config", '{"method": "eagle9"}'], 2, "speculative_config.method"),
    (["generate", "hi", "--max-draft", "-1"], 2, "max_draft"),
    (["generate", "hi", "--temprature", "1"], 2, "did you mean '--temperature'"),
    (["generate", "hi", "there"], 2, "quote arguments"),
    (["generate", "hi", "--raw", "--system", "x"], 2, "system"),
    (["generate", "hi", "--rule", "foo"], 2, "rule"),
    (["generate", "hi", "--kv-memory", "inf"], 2, "kv_memory"),
    (["generate", "hi", "--threads", "99999999999"], 2, "threads"),
    (["generate", "hi", "--device", "meta"], 2, "device"),
    (
        ["generate", "hi", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": "4"}'],
        2,
        "must be an integer",
    ),
    (["generate", "hi", "--device", "tpu9"], 2, "device"),
    (["generate", "hi", "--out", "/no/such/folder/x.json"], 2, "there is no folder"),
    (["genrate", "hi"], 2, "did you mean 'generate'"),
    (["generate"], 2, "required"),
    (["--nothing"], 2, "there is no option --nothing"),
]


@pytest.mark.parametrize(("words", "code", "message"), WRONG, ids=lambda case: str(case)[:40])
def test_bad_input_is_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, words: list[str], code: int, message: str
) -> None:
    model = ["--model", str(tiny_folder)] if words[:1] == ["generate"] else []
    got, out, err = run(capsys, *words, *model)
    assert got == code
    assert message in err
    assert len(err.strip().splitlines()) == 1, err
    assert out == ""


def test_models_that_cannot_be_used_are_one_line(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(b"GGUF\x03\x00\x00\x00\x05")
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    for model in ("smollm3-135m", "/no/such/model", str(cut), str(broken), "nobody/nothing", str(tmp_path)):
        code, out, err = run(capsys, "generate", "hi", "--model", model)
        assert code in (1, 2), model
        assert len(err.strip().splitlines()) == 1, err
        assert out == ""
    assert run(capsys, "generate", "hi", "--model", "smollm3-135m")[0] == 2


def test_bytes_that_are_not_utf8_are_refused_before_a_model_is_loaded() -> None:
    for env in ({}, {"PYTHONIOENCODING": "utf-8:surrogateescape"}, {"LC_ALL": "C"}):
        command = [sys.executable, "-m", "foretell", "generate", "-", "--model", "/no/such/model"]
        done = subprocess.run(command, input=b"caf\xe9 \xff", capture_output=True, env=os.environ | env)
        assert done.returncode == 2
        assert done.stderr.decode().startswith("foretell: prompt: standard input is not UTF-8")


def test_an_output_in_ascii_replaces_other_characters(tiny_folder: Path) -> None:
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "foretell", "generate", "é", "--model", str(tiny_folder), "--max-tokens", "2"]
    done = subprocess.run([*command, "--json"], capture_output=True, env=ascii_only)
    assert done.returncode == 0 and "text" in json.loads(done.stdout.decode("ascii"))
    wrong = subprocess.run([*command, "--rule", "é"], capture_output=True, env=ascii_only)
    assert wrong.returncode == 2 and b"internal error" not in wrong.stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[1].strip() == f"foretell {__version__}"
    code, out, _ = run(capsys, "generate", "--help")
    assert code == 0
    for flag in ("--model", "--drafter", "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed"):
        assert flag in out
    assert "--min-p" not in out and "more options: foretell generate --help-all" in out
    assert "--min-p" in run(capsys, "generate", "--help-all")[1]


def test_models_lists_the_built_in_names(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models")
    assert code == 0
    assert "smollm2-135m" in out
    assert "gemma3-270m" in out


def test_out_goes_through_links_and_into_pipes(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path
) -> None:
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    os.mkfifo(pipe)
    words = ["generate", PROMPT, "--model", str(tiny_folder), "--max-tokens", "2", "--ignore-eos", "--out"]
    assert run(capsys, *words, str(link))[0] == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["finish_reason"] == "length"
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert run(capsys, *words, str(pipe))[0] == 0
        assert reader.stdout is not None
        assert json.loads(reader.stdout.read())["finish_reason"] == "length"
    assert pipe.is_fifo()
    assert run(capsys, *words, str(tmp_path))[0] == 2


def test_logprobs_are_in_the_json_object(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    words = ["generate", PROMPT, "--model", str(tiny_folder), "--max-tokens", "2", "--logprobs", "1"]
    result = json.loads(run(capsys, *words, "--prompt-logprobs", "0", "--json")[1])
    assert [row[-1]["token"] for row in result["logprobs"]] == result["token_ids"]
    assert len(result["prompt_logprobs"]) == result["usage"]["prompt_tokens"]
    assert run(capsys, *words)[0] == 2


def test_models_and_pull_speak_json(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    listed = json.loads(run(capsys, "models", "--json")[1])
    assert {"smollm2-135m", "gemma3-270m"} <= {each["name"] for each in listed}
    assert json.loads(run(capsys, "pull", str(tiny_folder), "--json")[1])["path"] == str(tiny_folder)


def test_an_internal_error_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    monkeypatch.setattr("foretell.cli.generate.load_llm", lambda args: 1 / 0)
    code, _, err = run(capsys, "generate", "hi", "--model", str(tiny_folder))
    assert code == 1
    assert err.count("\n") == 1
    assert "FORETELL_DEBUG" in err
    monkeypatch.setenv("FORETELL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["generate", "hi", "--model", str(tiny_folder)])
