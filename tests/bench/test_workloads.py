"""What is asked: the set that ships, files of others, and the same sample every time."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foretell.bench.engine_backend import params_for
from foretell.bench.prompt import BenchPrompt
from foretell.bench.settings import BenchSettings
from foretell.bench.workloads import load, own, select
from foretell.errors import RequestError

KINDS = {
    "code",
    "chat",
    "persona",
    "summary",
    "extraction",
    "logs",
    "docstring",
    "translation",
    "math",
    "story",
    "edit",
}
COPIED = {"summary", "extraction", "logs", "edit"}


def words(item: BenchPrompt) -> int:
    return sum(len(str(message["content"]).split()) for message in item.messages)


def test_five_of_each_kind_and_none_twice() -> None:
    items = list(own())
    assert Counter(item.task for item in items) == dict.fromkeys(KINDS, 5)
    assert len({item.id for item in items}) == len({str(item.messages) for item in items}) == len(items)


@pytest.mark.parametrize("item", list(own()), ids=lambda item: item.id)
def test_an_item_is_a_conversation_of_a_likely_length(item: BenchPrompt) -> None:
    roles = [message["role"] for message in item.messages]
    talk = roles[1:] if roles[0] == "system" else roles
    assert talk == (["user", "assistant"] * 3)[: len(talk)] and talk[-1] == "user"
    assert (len(talk) > 1 and roles[0] == "system") == (item.task == "persona")
    assert 15 <= words(item) <= 350
    assert words(item) >= 35 or item.task not in COPIED
    assert 96 <= item.max_tokens <= 384


def test_an_edit_predicts_the_file_it_shows() -> None:
    for item in own():
        assert (item.prediction is not None) == (item.task == "edit")
        if item.prediction is not None:
            assert item.prediction in item.messages[-1]["content"]


def test_an_extraction_has_a_schema_that_can_be_enforced() -> None:
    for item in own():
        assert (item.schema is not None) == (item.task == "extraction")
        if isinstance(item.schema, dict):
            assert item.schema["required"] == list(item.schema["properties"])
            grammar = params_for(item, 0.0, BenchSettings()).structured_outputs
            assert grammar is not None and grammar.kind == "json_schema"
            assert params_for(item, 0.0, BenchSettings(schemas=False)).structured_outputs is None


def test_a_larger_sample_holds_the_smaller(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *({"id": f"{i}", "kind": "ab"[i % 2], "prompt": f"{i}?"} for i in range(40)))
    items = load("trace", path)
    few, more = (select(items, count, lambda item: True)[0] for count in (3, 5))
    assert [item.task for item in few] == ["a"] * 3 + ["b"] * 3
    assert few[:3] == more[:3] and few[3:] == more[5:8]
    assert items == load("trace", path), "the same every time"
    assert items != load("trace", path, seed=1)
    assert [item.id for item in few[:3]] != ["0", "2", "4"], "and not just the first ones"
    assert len(items) == 40


def test_another_is_taken_where_one_does_not_fit() -> None:
    items = [BenchPrompt(f"{task}-{i}", task) for task in ("a", "b") for i in range(4)]
    taken, left_out = select(items, 2, lambda item: item.id not in ("a-0", "b-3"))
    assert [item.id for item in taken] == ["a-1", "a-2", "b-0", "b-1"]
    assert [item.id for item in left_out] == ["a-0"], "what was not reached is not left out"


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_spec_bench_has_six_tasks(tmp_path: Path) -> None:
    categories = ["writing", "coding", "stem", "translation", "summarization", "qa", "math_reasoning", "rag"]
    lines = [
        {"question_id": i, "category": name, "turns": ["One?", "Two?"][: 2 - (i > 2)]}
        for i, name in enumerate(categories)
    ]
    write(tmp_path / "question.jsonl", *lines)
    items = load("spec-bench", tmp_path)
    assert Counter(item.task for item in items) == {"multi-turn": 3} | dict.fromkeys(categories[3:], 1)
    assert {item.turns for item in items if item.task == "multi-turn"} == {("Two?",)}
    assert {item.turns for item in items if item.task != "multi-turn"} == {()}
    assert items[0].messages == ({"role": "user", "content": "One?"},)


def test_mt_bench_keeps_its_categories(tmp_path: Path) -> None:
    line = {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}
    (tmp_path / "mt_bench").mkdir()
    write(tmp_path / "mt_bench" / "question.jsonl", line)
    (item,) = load("mt-bench", tmp_path)
    assert (item.id, item.task, item.turns) == ("81", "writing", ("Two?",))


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_packed_files_are_found_and_read(tmp_path: Path, ending: str, pack: Any) -> None:
    line = {"task_id": "HumanEval/0", "prompt": "def f():\n"}
    with pack(tmp_path / f"HumanEval.jsonl{ending}", "wt") as file:
        file.write(json.dumps(line))
    (item,) = load("humaneval", tmp_path)
    assert item.task == "humaneval" and "def f():" in item.messages[0]["content"]


def test_gsm8k_asks_its_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", {"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": "3"})
    assert [item.messages[0]["content"] for item in sorted(load("gsm8k", path), key=lambda item: item.id)] == [
        "1 + 1?",
        "1 + 2?",
    ]


def test_a_trace_is_asked_as_it_was_asked(tmp_path: Path) -> None:
    chat = {
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0.7,
        "stop": "END",
        "max_completion_tokens": 9,
        "prediction": {"type": "content", "content": [{"type": "text", "text": "Hi"}]},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "logprobs": True,
        "n": 3,
    }
    batch = {
        "custom_id": "mine",
        "method": "POST",
        "body": {"prompt": "Once upon", "max_tokens": 5, "seed": 4, "allowed_token_ids": [1, 2]},
    }
    path = write(tmp_path / "trace.jsonl", chat, batch, {"kind": "code", **chat, "temperature": None})
    first, second, third = sorted(load("trace", path), key=lambda item: item.id)
    assert (first.id, first.task, first.max_tokens, first.prediction) == ("1", "trace", 9, "Hi")
    assert first.sampling == {"temperature": 0.7, "stop": "END"} and first.schema == {"type": "object"}
    assert (second.id, second.task, second.sampling) == ("3", "code", {"stop": "END"})
    assert (third.id, third.text, third.messages, third.max_tokens) == ("mine", "Once upon", (), 5)
    assert third.sampling == {"seed": 4, "allowed_token_ids": [1, 2]}
    params = params_for(first, None, BenchSettings(max_tokens=8))
    assert (params.temperature, params.max_tokens, params.stop) == (0.7, 8, ("END",))
    assert params_for(first, 0.0, BenchSettings()).temperature == 0.0
    assert params_for(third, 1.0, BenchSettings()).seed == 4
    assert params_for(first, 1.0, BenchSettings()).seed == params_for(first, 1.0, BenchSettings()).seed is not None


def test_two_requests_of_one_name_are_two(tmp_path: Path) -> None:
    line = {"id": "same", "prompt": "Hi"}
    assert {item.id for item in load("trace", write(tmp_path / "t.jsonl", line, line))} == {"same", "same (2)"}


@pytest.mark.parametrize(
    ("workload", "text", "words"),
    [
        ("trace", "", "is empty"),
        ("trace", "{", "line 1 is not JSON"),
        ("trace", "\n[1]", "line 2 is not a JSON object"),
        ("trace", '{"prompt": ""}', "line 1: prompt must be a non-empty string"),
        ("trace", '{"messages": []}', "messages must be"),
        ("trace", '{"prompt": "a", "temperature": -1}', "line 1: temperature must be 0 or a positive"),
        ("trace", '{"prompt": "a", "max_tokens": 0}', "max_tokens must be an integer"),
        ("trace", '{"prompt": "a", "prediction": 3}', "prediction must be"),
        ("trace", '{"prompt": "a", "response_format": "json"}', "response_format must be an object"),
        ("spec-bench", '{"category": "qa", "turns": []}', "turns must be a list of strings"),
        ("gsm8k", '{"answer": "2"}', "question must be a non-empty string"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, workload: str, text: str, words: str) -> None:
    (tmp_path / "file.jsonl").write_text(text)
    with pytest.raises(RequestError, match=words) as caught:
        load(workload, tmp_path / "file.jsonl")
    assert caught.value.field == "data"


def test_what_is_missing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.gz").write_bytes(b"no gzip")
    for workload, data, words in [
        ("spec-bench", None, "spec-bench is not shipped; name its question.jsonl with --data"),
        ("trace", None, "name its file with one request per line"),
        ("trace", tmp_path, "is a folder; name a file"),
        ("humaneval", tmp_path, "there is no HumanEval.jsonl in"),
        ("gsm8k", tmp_path / "none.jsonl", "there is no"),
        ("gsm8k", tmp_path / "broken.gz", "cannot be read"),
        ("own", tmp_path, "own comes with the package"),
        ("spec-bnch", None, "did you mean 'spec-bench'"),
    ]:
        with pytest.raises(RequestError, match=words):
            load(workload, data)
    with pytest.raises(RequestError, match="did you mean 'logs'"):
        load("own", tasks=["log"])


def test_tasks_can_be_chosen() -> None:
    assert {item.task for item in load("own", tasks=["edit", "math"])} == {"edit", "math"}
