"""foretell generate: Ctrl-C keeps what there is."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from foretell import LLM, SamplingParams
from foretell.cli.interrupts import catch_interrupts
from foretell.cli.main import main
from foretell.engine.engine import Engine

PROMPT = "The quick brown fox"
STOPPED = 130  # exit code
WORDS = ["--max-tokens", "60", "--temperature", "0", "--ignore-eos", "--drafter", "none"]


def on_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Act in the middle of the engine's step with this number."""
    step, steps = Engine.step, []

    def counted(engine: Engine) -> None:
        steps.append(engine)
        if len(steps) == number:
            act()
        step(engine)

    monkeypatch.setattr(Engine, "step", counted)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_writes_the_output_so_far_and_marks_it(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", PROMPT, "--model", str(tiny_folder), *WORDS, "--json", "--out"]
    assert main([*words, str(tmp_path / "whole.json")]) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert "interrupted" not in whole
    capsys.readouterr()
    on_step(monkeypatch, 8, press)
    assert main([*words, str(tmp_path / "cut.json")]) == STOPPED
    out, err = capsys.readouterr()
    cut = json.loads((tmp_path / "cut.json").read_text())
    assert cut == json.loads(out)
    assert (cut["interrupted"], cut["finish_reason"]) == (True, "abort")
    count = len(cut["token_ids"])
    assert 0 < count < 60 and cut["token_ids"] == whole["token_ids"][:count]
    assert cut["usage"]["completion_tokens"] == count and cut["timings"]["total_s"] > 0
    assert err.splitlines()[-2:] == [
        f"foretell: {tmp_path / 'cut.json'} has the output so far, marked as interrupted",
        "foretell: stopped",
    ]


def test_ctrl_c_keeps_what_was_streamed(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", PROMPT, "--model", str(tiny_folder), *WORDS]
    assert main(words) == 0
    whole = capsys.readouterr().out
    on_step(monkeypatch, 8, press)
    assert main(words) == STOPPED
    out, err = capsys.readouterr()
    assert len(out) > 1 and whole.startswith(out.removesuffix("\n"))
    assert "[stopped after" in err and "tokens in" in err and err.splitlines()[-1] == "foretell: stopped"


def test_ctrl_c_before_the_first_token_gives_an_empty_output(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_step(monkeypatch, 1, press)
    words = ["generate", PROMPT * 8, "--model", str(tiny_folder), *WORDS, "--json", "--prompt-logprobs", "1"]
    assert main([*words, "--max-num-batched-tokens", "4", "--max-num-seqs", "1"]) == STOPPED
    cut = json.loads(capsys.readouterr().out)
    assert (cut["text"], cut["token_ids"], cut["finish_reason"]) == ("", [], "abort")
    assert cut["timings"]["tokens_per_second"] is None


def test_an_interrupted_batch_has_finished_and_aborted_outputs(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_folder, drafter="none", quiet=True)
    on_step(monkeypatch, 6, llm.interrupt)
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in (2, 50)]
    short, long = llm.generate([PROMPT, PROMPT], params)
    assert (short.outputs[0].finish_reason, long.outputs[0].finish_reason) == ("length", "abort")
    assert 2 < len(long.outputs[0].token_ids) < 50
    again = llm.generate(PROMPT, params[1])[0].outputs[0]
    assert again.finish_reason == "length", "an interrupt ends one call, not the next"
    assert again.token_ids[: len(long.outputs[0].token_ids)] == long.outputs[0].token_ids


def test_a_third_ctrl_c_raises_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), catch_interrupts() as pressed:
        press()
        press()
        assert len(pressed) == 2
        press()
    assert signal.getsignal(signal.SIGINT) is before
