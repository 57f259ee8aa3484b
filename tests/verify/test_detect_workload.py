"""The workload of a request is detected from its text."""

from __future__ import annotations

from time import process_time

import pytest

from foretell.verify.lossy import WORKLOADS, detect_workload

PROMPTS = {
    "Write a Python function that reverses a list.": "code",
    "Fix the bug:\n```\nfor i in range(10) print(i)\n```": "code",
    "def add(a, b):\n    return (a + b)\n\ndef sub(a, b):": "code",
    "int main() {\n  int x = 3;\n  return x;\n}": "code",
    "Implement a function that parses JSON into a tree.": "code",
    "Write a SQL query for the ten oldest users": "code",
    "const a = [1, 2]\nlet total = 0\nfor (const x of a) {": "code",
    '{"name": "Ada", "born": 1815,': "json",
    '[\n  {"id": 1},\n  {"id": 2},': "json",
    "List three rivers of France as JSON.": "json",
    "Extract names and dates. Respond only with a JSON object.": "json",
    "Once upon a time there was a king who": "narrative",
    "Write a short story about a python who learns to dance.": "narrative",
    "Who was JSON named after, and why do people like the format?": "narrative",
    "Tell me about the class system in Victorian England; was it fair?": "narrative",
    "Summarise: the meeting went on for three hours.\nNo one spoke;\nthen all did.": "narrative",
    "": "narrative",
}


@pytest.mark.parametrize("text", PROMPTS)
def test_the_workload_is_detected_from_the_text(text: str) -> None:
    assert detect_workload(text, wants_json=False) == PROMPTS[text]


@pytest.mark.parametrize("text", PROMPTS)
def test_a_json_response_format_decides(text: str) -> None:
    assert detect_workload(text, wants_json=True) == "json"


def test_every_workload_has_a_threshold() -> None:
    assert set(PROMPTS.values()) == set(WORKLOADS)
    assert all(0 < threshold < 1 for threshold in WORKLOADS.values())


@pytest.mark.parametrize("piece", ["write ", "only ", "return ", "a" * 50, "{ ", " ", "\n", "def f( "])
def test_a_long_text_is_classified_in_bounded_time(piece: str) -> None:
    text = piece * (300_000 // len(piece))
    began = process_time()
    detect_workload(text, wants_json=False)
    assert process_time() - began < 2
