"""Scripts that measure are run by hand: what they take from the package must still be there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "bench").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_of_us_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("foretell"):
            continue
        if ".triton" in (node.module or "") or "cuda" in (node.module or ""):
            pytest.importorskip("triton", reason="no Triton is here")
        module = importlib.import_module(node.module or "")
        missing = [name.name for name in node.names if not hasattr(module, name.name)]
        missing = [name for name in missing if importlib.util.find_spec(f"{node.module}.{name}") is None]
        assert not missing, f"{script.name}: {node.module} has no {missing}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_its_siblings_by_their_own_names(script: Path) -> None:
    """`python bench/NAME.py` has the folder bench on its path, not the one above."""
    source = script.read_text()
    puts_root_on_path = "sys.path" in source
    assert puts_root_on_path or not [line for line in source.splitlines() if line.startswith("from bench")]
