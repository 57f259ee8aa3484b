"""The tables of docs/explanation/architecture.md, the source tree of CONTRIBUTING.md, and names agree with the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "foretell"
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
QUESTIONS = re.findall(r"^\| ([A-Z][^|]*\?) \| ([^|]*) \| `([^`]*)` \| `([^`]*)` \|$", PAGE, re.M)
HOPS = re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", PAGE, re.M)


def definitions(path: Path) -> set[str]:
    """Return the functions, classes and methods of a module, methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{method.name}" for method in methods)
    return found


def test_the_page_answers_twelve_questions() -> None:
    assert len(QUESTIONS) == 12


@pytest.mark.parametrize(("question", "terms", "file", "function"), QUESTIONS, ids=[row[0] for row in QUESTIONS])
def test_an_answer_is_where_the_page_says(question: str, terms: str, file: str, function: str) -> None:
    path = PACKAGE / file
    assert function in definitions(path)
    source = path.read_text().lower()
    for term in re.findall(r"`([^`]*)`", terms):
        assert term.lower() in source, f"a search for {term!r} finds {file}"


def test_the_walk_of_a_request_is_short_and_goes_one_way() -> None:
    files = [file for file, _ in HOPS]
    assert 10 <= len(HOPS) <= 25 and len(set(files)) <= 20
    pairs = [pair for pair in zip(files, files[1:], strict=False) if pair[0] != pair[1]]
    assert len(pairs) == len(set(map(frozenset, pairs))), "no two modules call back and forth"
    for file, function in HOPS:
        assert function in definitions(PACKAGE / file), f"{file}: {function}"


def test_the_source_tree_lists_every_package() -> None:
    tree = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("## Source tree")[2].partition("```\n")[2].partition("```")[0]
    )
    listed = set(re.findall(r"([a-z_]+)/", tree)) | set(re.findall(r"([a-z_]+)\.py", tree))
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__", "version")}
    assert packages | modules <= listed


def test_a_class_name_belongs_to_one_package() -> None:
    modules: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(path.relative_to(PACKAGE).parts)
    shared = {name: found for name, found in modules.items() if len(found) > 1}
    assert len(shared) <= 10, "a class name in several modules has several meanings"
    across = {name: found for name, found in shared.items() if len({parts[0] for parts in found}) > 1}
    assert not across


def test_the_list_of_benchmark_scripts_is_complete() -> None:
    listed = set(re.findall(r"`(\w+\.py)`", (ROOT / "bench" / "README.md").read_text()))
    scripts = {path.name for path in (ROOT / "bench").glob("*.py")}
    assert scripts <= listed
