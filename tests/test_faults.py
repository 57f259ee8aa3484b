"""The fault plan names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "reference" / "faults.md").read_text())


def test_the_fault_plan_names_tests() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize("file, test", sorted(set(NAMED)))
def test_a_test_that_the_fault_plan_names_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert test in found if test else any(name.startswith("test_") for name in found)
