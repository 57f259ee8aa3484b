"""Head hot-swap: a running engine takes a better head, not a worse one, and its output stays the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from foretell.build.head_hot_swap import HeadHotSwap, load_or_report
from foretell.cli.main import main
from foretell.errors import ModelError
from foretell.llm import LLM
from foretell.sampling_params import SamplingParams
from tests.folder import write_tiny_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["The quick brown fox", "She sells sea shells"]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, a barely trained head, and a better one."""
    folder = tmp_path_factory.mktemp("replacing")
    write_tiny_folder(folder / "model")
    rows = [{"prompt": f"{text} {i}"} for i in range(8) for text in PROMPTS]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    for name, steps in (("poor", "1"), ("good", "80")):
        line = ["train", "eagle", "--target", str(folder / "model"), "--data", str(folder / "data.jsonl")]
        more = ["--max-tokens", "24", "--context", "64", "--greedy", "1", "--learning-rate", "0.01", "--warmup", "5"]
        assert (
            main([*line, "--out", str(folder / name), "--steps", steps, *more, "--no-measure", "--optimizer", "adamw"])
            == 0
        )
    return folder


def put(head: Path, folder: Path, when: int) -> None:
    """Copy a head into a folder, with `when` as its modification time."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(head / name, folder / name)
        os.utime(folder / name, (when, when))


def test_a_better_head_is_taken_and_a_worse_one_is_not(heads: Path, tmp_path: Path) -> None:
    llm = LLM(heads / "model", drafter=f"eagle:{heads / 'poor'}", num_speculative_tokens=3, quiet=True)
    before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    replacement = HeadHotSwap(tmp_path / "new", llm.engine)
    assert replacement.load_candidate() is None, "there is nothing there yet"
    put(heads / "good", tmp_path / "new", 1)
    better = replacement.load_candidate()
    assert better is not None and "replaced the head of eagle" in replacement.replace_if_better(better)
    drafter: Any = llm.engine.drafter.drafters[better.name]
    assert drafter.head is drafter.ops.head is better.head
    assert drafter._native is None or drafter._native.head is better.head, "and native drafting uses it"
    assert replacement.load_candidate() is None, "it was read already"
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == before
    put(heads / "poor", tmp_path / "new", 2)
    worse = replacement.load_candidate()
    assert worse is not None and "not used" in replacement.replace_if_better(worse)
    assert llm.engine.drafter.drafters[better.name].head is better.head  # type: ignore[attr-defined]


def test_an_unreadable_head_is_reported_and_changes_nothing(heads: Path, tmp_path: Path) -> None:
    llm = LLM(heads / "model", drafter=f"eagle:{heads / 'poor'}", num_speculative_tokens=3, quiet=True)
    replacement = HeadHotSwap(tmp_path / "new", llm.engine)
    put(heads / "good", tmp_path / "new", 1)
    (tmp_path / "new" / "model.safetensors").write_bytes(b"half a file")
    found = load_or_report(replacement)
    assert isinstance(found, str) and found
    with pytest.raises(ModelError, match="no draft head is served"):
        HeadHotSwap(tmp_path, LLM(heads / "model", drafter="ngram", quiet=True).engine)


def test_a_head_that_could_not_be_measured_is_tried_again(heads: Path, tmp_path: Path) -> None:
    llm = LLM(heads / "model", drafter=f"eagle:{heads / 'poor'}", num_speculative_tokens=3, quiet=True)
    replacement, pool, tokenizer = (
        HeadHotSwap(tmp_path / "new", llm.engine),
        llm.engine.runner.pool,
        llm.engine.tokenizer,
    )
    put(heads / "good", tmp_path / "new", 1)
    better = replacement.load_candidate()
    assert better is not None
    held = pool.allocate(pool.num_available)
    assert held is not None
    assert "not measured yet" in replacement.replace_if_better(better)
    assert replacement.load_candidate() is better and replacement.replace_if_better(better) == "", "it is reported once"
    pool.release(held)
    llm.engine.tokenizer = None  # nothing runs, and there are no prompts to measure with
    assert replacement.replace_if_better(better) == ""
    llm.engine.tokenizer = tokenizer
    assert replacement.load_candidate() is better and ": replaced the head of eagle" in replacement.replace_if_better(
        better
    )
    assert replacement.load_candidate() is None
