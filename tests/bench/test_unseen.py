"""Short requests never seen before are measured one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.bench.prompt import BenchPrompt
from foretell.bench.unseen import UnseenCell, fifth_percentile, prompts
from foretell.cli.main import main


def cell(fifth: float, slow: float, noise: float = 1.0, noise_slow: float = 0.0) -> UnseenCell:
    return UnseenCell("auto", 0.0, 100, 1, 1.1, fifth, slow, 1.0, noise, noise_slow, True, ())


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (cell(0.98, 0.02), "held"),
        (cell(0.96, 0.0), "slower"),
        (cell(0.98, 0.03), "slower"),
        (cell(0.96, 0.0, noise=0.96), "inconclusive"),
        (cell(0.98, 0.03, noise_slow=0.03), "inconclusive"),
        (cell(0.98, 0.0, noise=0.9), "held"),
    ],
)
def test_a_verdict_needs_both_bars_and_a_quiet_machine(found: UnseenCell, verdict: str) -> None:
    assert found.verdict == verdict


def test_the_fifth_percentile_is_exceeded_by_95_of_100_requests() -> None:
    assert fifth_percentile([i / 100 for i in range(101)]) == pytest.approx(0.05)
    assert fifth_percentile([0.9]) == 0.9


def test_prompts_take_tasks_in_turn_and_none_twice() -> None:
    def prompt(task: str, number: int) -> BenchPrompt:
        return BenchPrompt(f"{task}{number}", task, ({"role": "user", "content": f"{task} {number}"},))

    found = prompts([prompt(task, number) for task in ("chat", "edit", "code") for number in range(3)], 8)
    assert [item.task for item in found[:4]] == ["chat", "code", "chat", "code"]
    assert len({str(item.messages) for item in found}) == 8 and "edit" not in {item.task for item in found}


def test_the_command_measures_new_prompts(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    short = [BenchPrompt(str(i), "chat", (), text=f"a b c {i}") for i in range(2)]
    monkeypatch.setattr("foretell.bench.unseen.prompts", lambda items, count: short[:count])
    out, page = tmp_path / "found.json", tmp_path / "found.html"
    command = ["bench", "never-slower", "--unseen", "2", "--max-tokens", "8", "--drafters", "suffix,recycle"]
    code = main([*command, "--model", str(tiny_folder), "--out", str(out), "--html", str(page)])
    assert code in (0, 1, 4), "speeds of so short requests are noise"
    found = json.loads(out.read_text())
    assert [cell["drafter"] for cell in found["cells"]] == ["suffix,recycle"] * 2
    assert all(cell["same_text"] and cell["requests"] == 2 for cell in found["cells"])
    assert "unseen" in page.read_text()
    assert all(cell["noise_speedup"] > 0 and cell["noise_speedup"] != cell["speedup"] for cell in found["cells"])
    assert main([*command, "--quick", "--model", str(tiny_folder)]) == 2
