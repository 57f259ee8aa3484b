"""Scripts outside of the package import only names that exist; no other test runs all of them."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for folder in ("bench", "recipes", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_names_that_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "foretell":
            module = import_module(node.module or "")
            missing = [
                each.name for each in node.names if not hasattr(module, each.name) and not _is_module(node, each)
            ]
            assert not missing, f"{node.module} has no {missing}"


def _is_module(node: ast.ImportFrom, name: ast.alias) -> bool:
    try:
        import_module(f"{node.module}.{name.name}")
    except ModuleNotFoundError:
        return False
    return True
