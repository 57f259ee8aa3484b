"""Checkpoint selection, and the prompts that figures come from."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foretell.cli.main import main
from foretell.errors import RequestError
from foretell.tokenizer.turn_rules import TurnRules
from foretell.train.corpus import Corpus
from foretell.train.data import parse_row
from foretell.train.measure import DrafterEvaluator, MeasuredAcceptance
from foretell.train.regenerate import encode_prompt
from foretell.train.run import TrainingRun, check_same
from foretell.train.token_dataset import Document
from foretell.train.trainer import Trainer, TrainingState, load_checkpoint
from tests.folder import write_tiny_folder

FLAGS = ["--max-tokens", "16", "--context", "96", "--draft-vocab", "64", "--held-out", "4", "--batch-tokens", "256"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_folder(tmp_path / "model")
    rows = [{"prompt": f"The quick brown fox number {i} jumps over the lazy dog."} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "corpus.txt").write_text("She sells sea shells by the sea shore. " * 60)
    return tmp_path


def train(folder: Path, *more: str, data: str = "data.jsonl") -> int:
    line = ["train", "medusa", "--target", str(folder / "model"), "--data", str(folder / data)]
    return main([*line, "--out", str(folder / "out"), "--no-certify", "--long-context", "120", *FLAGS, *more])


def measured(monkeypatch: pytest.MonkeyPatch, figures: list[float]) -> list[list[list[int]]]:
    """Make the engine return these figures in turn; return the prompts of each measurement."""
    seen: list[list[list[int]]] = []

    def measure(evaluator: DrafterEvaluator, drafter: str) -> MeasuredAcceptance:
        seen.append(evaluator.prompts)
        return MeasuredAcceptance(figures[min(len(seen), len(figures)) - 1], 3, len(evaluator.prompts))

    monkeypatch.setattr(DrafterEvaluator, "measure", measure)
    return seen


def test_a_resumed_run_keeps_the_better_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, [2.5, 1.8])
    monkeypatch.setattr(Trainer, "done", property(lambda trainer: trainer.state.step >= 40))
    assert train(folder, "--steps", "40", "--piece", "0.001s") == 0
    head = (folder / "out" / "model.safetensors").read_bytes()
    assert load_checkpoint(folder / "out")[0].best == 2.5
    assert train(folder, "--steps", "40", "--piece", "0.001s", "--resume") == 0
    assert load_checkpoint(folder / "out")[0].best == 2.5
    assert (folder / "out" / "model.safetensors").read_bytes() == head, "1.8 tokens per step is worse"


def test_an_evaluation_is_in_the_checkpoint_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, [2.5])
    evaluate, bests = TrainingRun.evaluate_checkpoint, []

    def stop_at_the_second(run: TrainingRun) -> None:
        if run.trainer.state.best:
            bests.append(load_checkpoint(folder / "out")[0].best)
            raise KeyboardInterrupt
        evaluate(run)

    monkeypatch.setattr(TrainingRun, "evaluate_checkpoint", stop_at_the_second)
    with contextlib.suppress(KeyboardInterrupt):
        train(folder, "--steps", "40", "--check-every", "0.001s", "--save-every", "1h")
    assert bests == [2.5]


def test_heads_for_plain_text_are_measured_and_the_best_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = measured(monkeypatch, [2.0, 3.0, 1.5])
    assert train(folder, "--steps", "3", "--check-every", "0.0001s", data="corpus.txt") == 0
    assert all(prompts and all(prompts) for prompts in seen), "there are prompts"
    record = json.loads((folder / "out" / "run.json").read_text())
    assert record["best"] == 3.0 and record["engine"]["prompts"] > 0


def test_the_reported_figure_is_of_prompts_not_used_for_selection(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = measured(monkeypatch, [2.0])
    assert train(folder, "--steps", "2") == 0
    selection, reported = seen
    assert selection and reported
    assert not any(prompt in selection for prompt in reported)


@pytest.mark.parametrize(("count", "selection", "report"), [(1, [0], [0]), (2, [0], [1]), (5, [0, 2, 4], [1, 3])])
def test_held_out_documents_are_halved(count: int, selection: list[int], report: list[int]) -> None:
    documents = [Document(np.arange(9), 3, index=i) for i in range(count)]
    corpus: Any = SimpleNamespace(held_out=documents)
    assert [each.index for each in Corpus.selection_documents.fget(corpus)] == selection  # type: ignore[attr-defined]
    assert [each.index for each in Corpus.report_documents.fget(corpus)] == report  # type: ignore[attr-defined]


def test_plain_text_is_prompted_with_its_first_half() -> None:
    assert Document(np.arange(10), 1).eval_prompt == [0, 1, 2, 3, 4]
    assert Document(np.arange(10), 3).eval_prompt == [0, 1, 2]


def test_resuming_with_another_target_is_refused() -> None:
    check_same(TrainingState(), TrainingState(target_hash="new"))  # a checkpoint of an older version has none
    with pytest.raises(RequestError, match="target"):
        check_same(TrainingState(target_hash="old"), TrainingState(target_hash="new"))


class FakeTokenizer:
    """Stores the arguments of its chat template."""

    tool_template = chat_template = "a template that knows system, user, assistant, tool and tools"

    def turn_rules(self, with_tools: bool) -> TurnRules:
        return TurnRules()

    def apply_chat_template(self, messages: list[Any], **values: Any) -> str:
        self.messages, self.values = messages, values
        return "rendered"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        assert text == "rendered" and not add_special
        return [1, 2, 3]


TOOL = {"type": "function", "function": {"name": "clock", "description": "the time"}}
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}


def logged(**more: Any) -> FakeTokenizer:
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    row = {"kind": "chat", "request": {"messages": messages, **more}, "answers": [{"token_ids": [5, 6]}]}
    prompt, tokenizer = parse_row(row), FakeTokenizer()
    assert prompt is not None and prompt.answer_tokens == (5, 6)
    assert encode_prompt(prompt, tokenizer) == [1, 2, 3]  # type: ignore[arg-type]
    return tokenizer


def test_a_logged_chat_is_rendered_as_the_server_renders_it() -> None:
    found = logged(tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
    assert [each["role"] for each in found.messages] == ["system", "assistant", "tool"]
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}
    assert found.values["enable_thinking"] is False and found.values["tools"][0]["function"]["name"] == "clock"
    assert logged(tools=[TOOL], tool_choice="none").values["tools"] is None


def test_an_invalid_logged_chat_is_refused() -> None:
    with pytest.raises(RequestError, match="from_log: has an invalid chat request: temperature"):
        logged(temperature="warm")


def test_chats_that_differ_in_template_variables_are_not_duplicates() -> None:
    rows = [
        {"kind": "chat", "request": {"messages": [], "chat_template_kwargs": {"a": i}}, "answers": [{"token_ids": [5]}]}
        for i in range(2)
    ]
    assert len({prompt.key for row in rows if (prompt := parse_row(row)) is not None}) == 2
