"""Loading of training prompts: known schemas are read, others are refused."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from foretell.errors import RequestError
from foretell.train.data import load_prompts

ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "old"}]},
    {"conversations": [{"from": "human", "value": "how"}, {"from": "gpt", "value": "so"}]},
    {"prompt": "write"},
    {"instruction": "sum up", "input": "a text"},
    {"custom_id": "1", "body": {"messages": [{"role": "user", "content": "batch"}]}},
]


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_every_schema_is_read(tmp_path: Path) -> None:
    prompts = load_prompts(str(write(tmp_path / "data.jsonl", ROWS)))
    assert [prompt.messages[-1]["content"] for prompt in prompts] == ["hi", "how", "write", "sum up\n\na text", "batch"]
    assert not any(prompt.answer_tokens or prompt.is_document for prompt in prompts)


def test_a_folder_gives_all_its_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS[:1])
    (tmp_path / "b.txt").write_text("A plain text.")
    with gzip.open(tmp_path / "c.json.gz", "wt") as file:
        json.dump(ROWS[2:4], file)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    prompts = load_prompts(str(tmp_path))
    assert len(prompts) == 4 and sum(prompt.is_document for prompt in prompts) == 1


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(ROWS[2]) + "\n"))
    assert load_prompts("-")[0].messages[0]["content"] == "write"


def test_a_logged_request_keeps_its_answer(tmp_path: Path) -> None:
    row = {
        "kind": "chat",
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "answers": [{"token_ids": [5, 6, 7]}],
    }
    assert load_prompts(str(write(tmp_path / "log.jsonl", [row])))[0].answer_tokens == (5, 6, 7)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", "", "no usable text"),
        ("a.jsonl", '{"price": 3}\n{"price": 4}', "0 of 2 rows"),
        ("a.jsonl", "not json", "line 1 is not JSON"),
        ("a.txt", "  \n ", "no usable text"),
        ("a.jsonl", '{"prompt": ""}', "0 of 1 rows"),
    ],
)
def test_data_without_prompts_is_refused(name: str, content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(RequestError, match=reason):
        load_prompts(str(path))


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no"):
        load_prompts(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(RequestError, match="no .jsonl"):
        load_prompts(str(tmp_path))
