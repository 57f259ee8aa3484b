"""Answers of an earlier run are reused only where target, settings and prompts are the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretell.cli.main import main
from foretell.train.data import TrainPrompt
from foretell.train.regenerate import INDEX_STRIDE, AnswerCache, RegenerateSettings, regenerate
from foretell.train.token_dataset import (
    ANSWERS_FILE,
    HASH_BLOCK,
    HASH_BLOCKS,
    Document,
    answers_fingerprint,
    load_documents,
    load_fingerprint,
    save_documents,
    target_fingerprint,
)
from tests.folder import write_tiny_folder

PROMPTS = [TrainPrompt(tokens=(1, 2, 3)), TrainPrompt(tokens=(4, 5, 6))]
OTHER_PROMPTS = [TrainPrompt(tokens=(7, 8, 9)), TrainPrompt(tokens=(4, 5, 6))]
SETTINGS = RegenerateSettings(6, 64, 1.0, 0.0, 0)


class FakeLLM:
    """Answers every prompt with one repeated token."""

    def __init__(self, mark: int) -> None:
        self.mark, self.asked = mark, 0

    def generate(self, prompts: list[list[int]], params: object) -> list[Any]:
        self.asked += len(prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[self.mark] * 6)]) for _ in prompts]


def answer(
    llm: FakeLLM, prompts: list[TrainPrompt], folder: Path, target: str = "a", settings: RegenerateSettings = SETTINGS
) -> tuple[list[list[int]], list[str]]:
    source: Any = SimpleNamespace(tokenizer=None, device=torch.device("cpu"))
    logged_lines: list[str] = []
    engine: Any = lambda: llm  # noqa: E731
    cache = AnswerCache(folder, answers_fingerprint(target, settings), logged_lines.append)
    found = regenerate(prompts, source, engine, engine, settings, cache, lambda count, total: None)
    return [each.tokens.tolist() for each in found], logged_lines


def test_the_same_run_reuses_its_answers(tmp_path: Path) -> None:
    first, again = FakeLLM(11), FakeLLM(22)
    sequences, logged_lines = answer(first, PROMPTS, tmp_path)
    assert logged_lines == [] and first.asked == 2
    same, logged_lines = answer(again, PROMPTS, tmp_path)
    assert same == sequences and again.asked == 0
    assert logged_lines == [f"{tmp_path / ANSWERS_FILE}: 2 of 2 answers reused"]


@pytest.mark.parametrize(
    ("target", "settings", "named"),
    [
        ("b", SETTINGS, "target changed"),
        ("a", RegenerateSettings(6, 64, 1.0, 0.0, 5), "seed changed"),
        ("a", RegenerateSettings(5, 64, 0.0, 0.9, 0), "max_tokens, greedy, temperature changed"),
    ],
)
def test_another_target_or_other_settings_reuse_nothing(
    tmp_path: Path, target: str, settings: RegenerateSettings, named: str
) -> None:
    answer(FakeLLM(11), PROMPTS, tmp_path)
    other = FakeLLM(22)
    sequences, logged_lines = answer(other, PROMPTS, tmp_path, target, settings)
    assert other.asked == 2 and all(text[-1] == 22 for text in sequences)
    assert len(logged_lines) == 1 and "none of 2 answers reused" in logged_lines[0] and named in logged_lines[0]
    assert {int(each.tokens[-1]) for each in load_documents(tmp_path / ANSWERS_FILE)} == {22}
    assert {int(each.tokens[-1]) for each in load_documents(tmp_path / "answers.old.npz")} == {11}


def test_other_prompts_are_answered_and_equal_ones_reused(tmp_path: Path) -> None:
    answer(FakeLLM(11), PROMPTS, tmp_path)
    other = FakeLLM(22)
    sequences, logged_lines = answer(other, OTHER_PROMPTS, tmp_path)
    assert [text[0] for text in sequences] == [7, 4] and [text[-1] for text in sequences] == [22, 11]
    assert other.asked == 1 and logged_lines == [
        f"{tmp_path / ANSWERS_FILE}: 1 of 2 answers reused, 1 not: their prompts differ"
    ]


def test_answers_without_a_fingerprint_are_not_reused(tmp_path: Path) -> None:
    save_documents([Document(np.array([1, 2, 3, 9, 9, 9, 9]), 3)], tmp_path / ANSWERS_FILE)
    llm = FakeLLM(22)
    _, logged_lines = answer(llm, PROMPTS, tmp_path)
    assert llm.asked == 2 and "older version" in logged_lines[0]


def test_what_is_in_the_data_is_never_taken_from_the_file(tmp_path: Path) -> None:
    answer(FakeLLM(11), PROMPTS, tmp_path)
    logged = [TrainPrompt(tokens=(1, 2, 3), answer_tokens=(50, 51, 52, 53)), PROMPTS[1]]
    sequences, _ = answer(FakeLLM(22), logged, tmp_path)
    assert sequences[0] == [1, 2, 3, 50, 51, 52, 53]


def test_a_probe_of_some_prompts_keeps_the_answers_of_the_rest(tmp_path: Path) -> None:
    answer(FakeLLM(11), PROMPTS, tmp_path)
    llm = FakeLLM(22)
    sequences, _ = answer(llm, OTHER_PROMPTS[:1], tmp_path)
    assert len(sequences) == 1 and llm.asked == 1
    assert [each.index for each in load_documents(tmp_path / ANSWERS_FILE)] == [0, INDEX_STRIDE]
    sequences, _ = answer(llm, OTHER_PROMPTS, tmp_path)
    assert llm.asked == 1 and [text[-1] for text in sequences] == [22, 11]


def test_a_target_is_known_by_what_its_files_hold(tmp_path: Path) -> None:
    one, copy, other = (write_tiny_folder(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert target_fingerprint(one) == target_fingerprint(copy) != target_fingerprint(other)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert target_fingerprint(one) != target_fingerprint(copy)


def test_large_files_are_hashed_from_the_first_byte_to_the_last(tmp_path: Path) -> None:
    size = HASH_BLOCK * (HASH_BLOCKS + 1)
    file, seen = tmp_path / "model.gguf", set()
    for at in (None, 0, size - 1):
        data = bytearray(size)
        if at is not None:
            data[at] = 1
        file.write_bytes(data)
        seen.add(target_fingerprint(file))
    assert len(seen) == 3


def test_a_second_run_in_the_same_folder_asks_its_own_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"The quick brown fox number {i} jumps."} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out"), "--max-tokens", "8"]
    seen = []
    for name, seed in (("a", 0), ("b", 1), ("b", 1)):
        write_tiny_folder(tmp_path / name, seed)
        assert main(["train", "eagle", "--target", str(tmp_path / name), *flags, "--answers-only"]) == 0
        seen.append((load_fingerprint(tmp_path / "out" / ANSWERS_FILE) or {})["target"])
        err = capsys.readouterr().err
        reused = {"a": "", "b": "target changed" if len(seen) == 2 else "4 of 4 answers reused"}[name]
        assert reused in err
    assert seen[0] != seen[1] == seen[2]
