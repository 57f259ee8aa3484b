"""Data as people have it is read, and what is no data is refused in words."""

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


def test_every_shape_is_asked(tmp_path: Path) -> None:
    asks = load_prompts(str(write(tmp_path / "data.jsonl", ROWS)))
    assert [ask.messages[-1]["content"] for ask in asks] == ["hi", "how", "write", "sum up\n\na text", "batch"]
    assert not any(ask.answer_tokens or ask.is_document for ask in asks)


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS[:1])
    (tmp_path / "b.txt").write_text("A running text.")
    with gzip.open(tmp_path / "c.json.gz", "wt") as file:
        json.dump(ROWS[2:4], file)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    asks = load_prompts(str(tmp_path))
    assert len(asks) == 4 and sum(ask.is_document for ask in asks) == 1


def test_a_pipe_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(ROWS[2]) + "\n"))
    assert load_prompts("-")[0].messages[0]["content"] == "write"


def test_what_was_served_keeps_its_answer(tmp_path: Path) -> None:
    row = {
        "kind": "chat",
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "answers": [{"token_ids": [5, 6, 7]}],
    }
    assert load_prompts(str(write(tmp_path / "log.jsonl", [row])))[0].answer_tokens == (5, 6, 7)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "", "no usable text"),
        ("a.jsonl", '{"price": 3}\n{"price": 4}', "0 of 2 rows"),
        ("a.jsonl", "not json", "line 1 is not JSON"),
        ("a.txt", "  \n ", "no usable text"),
        ("a.jsonl", '{"prompt": ""}', "0 of 1 rows"),
    ],
)
def test_no_data_is_refused(name: str, content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(RequestError, match=words):
        load_prompts(str(path))


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no"):
        load_prompts(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(RequestError, match="no .jsonl"):
        load_prompts(str(tmp_path))
