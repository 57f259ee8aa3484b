"""The tables of docs/explanation/architecture.md, the source tree of CONTRIBUTING.md, and names agree with the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.laws.test_layers import ALLOWED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "foretell"
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
QUESTIONS = re.findall(r"^\| ([A-Z][^|]*\?) \| ([^|]*) \| `([^`]*)` \| `([^`]*)` \|$", PAGE, re.M)
HOPS = re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", PAGE, re.M)
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text().lower() for path in PACKAGE.rglob("*.py")}
MOST_FOUND = 3  # files that a search for a term may find


def walk() -> list[tuple[str, str]]:
    """Return the calls of the walk of a request in their order, as file and function; Before and Then included."""
    section = PAGE.partition("## The walk of a request")[2].partition("\n## ")[0]
    calls: list[tuple[str, str]] = []
    for item in re.split(r"^\d+\. ", section, flags=re.M)[1:]:
        first, _, rest = item.partition("\n")
        file, function = re.findall(r"`([^`]*)`", first)[:2]
        around: list[tuple[str, str]] = []
        for word in re.findall(r"`([^`]*)`", rest):
            file_of_call = word if word.endswith(".py") else around[-1][0] if around else ""
            around.append((file_of_call, word))
        around = [call for call in around if call[0] != call[1]]
        before = around if rest.lstrip().startswith("Before") else []
        calls += [*before, (file, function), *(around if around is not before else [])]
    return calls


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
    assert function in definitions(PACKAGE / file)
    for term in re.findall(r"`([^`]*)`", terms):
        found = {path for path, source in SOURCES.items() if term.lower() in source}
        assert file in found and len(found) <= MOST_FOUND, f"a search for {term!r} finds {sorted(found)}"


def test_the_walk_of_a_request_is_short_and_goes_one_way() -> None:
    files = [file for file, _ in HOPS]
    assert 10 <= len(HOPS) <= 25 and len(set(files)) <= 20
    pairs = [pair for pair in zip(files, files[1:], strict=False) if pair[0] != pair[1]]
    assert len(pairs) == len(set(map(frozenset, pairs))), "no two modules call back and forth"
    for file, function in walk():
        assert function in definitions(PACKAGE / file), f"{file}: {function}"
    more = {file for file, _ in walk()} - set(files)
    assert f"{len(HOPS)} hops in {len(set(files))} files" in PAGE and f"in {len(more)} more" in PAGE


def test_the_layers_on_the_page_are_those_of_the_table_of_imports() -> None:
    lines = PAGE.partition("## Layers: imports only point down\n```\n")[2].partition("\n```")[0].splitlines()
    rows = {name: row for row, line in enumerate(lines) for name in re.findall(r"[a-z_]+", line.partition("  ")[0])}
    above = {"__init__", "__main__", "version"}  # they are the package itself, not a layer
    assert set(rows) == set(ALLOWED) - above
    base = len(lines) - 1
    for name, imports in ALLOWED.items():
        for each in imports - above if name in rows else ():
            points_down = rows[each] > rows[name] or rows[each] == rows[name] == base
            assert points_down or (name, each) == ("outputs", "engine"), f"{name} may import {each}"


def test_the_source_tree_lists_every_package_and_its_parts() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text.partition("## Source tree")[2].partition("```\n")[2].partition("```")[0]
    listed: dict[str, str] = {}  # by package or module: the lines of its entry
    names: list[str] = []
    for line in tree.splitlines():
        head = line[:34] if line.startswith("  ") else ""
        names = re.findall(r"([a-z_]+)(?:/|\.py)", line if "types.py" in line else head) or names
        listed |= {name: f"{listed.get(name, '')} {line}" for name in names}
    modules = {path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__", "version")}
    assert modules <= set(listed)
    for path in PACKAGE.glob("*/**/__init__.py"):
        package, *parts = path.parent.relative_to(PACKAGE).parts
        assert package in listed and all(f"{part}/" in listed[package] for part in parts), path.parent


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


def test_every_benchmark_is_named_next_to_a_figure() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    started = {"gpu_peer_ours.py", "gpu_peer_vllm.py"}  # by gpu_peers.py
    scripts = {path.name for path in (ROOT / "bench").glob("*.py") if '"__main__"' in path.read_text()}
    assert not [name for name in scripts - started if f"bench/{name}" not in pages]


def test_a_word_of_the_benchmarks_has_one_meaning() -> None:
    """A plan estimates other hardware or memory; a variant is an arm only in JSON, where the key is old."""
    for path in [*(PACKAGE / "bench").rglob("*.py"), *(PACKAGE / "tune").glob("*.py"), *PACKAGE.glob("cli/bench*.py")]:
        source = path.read_text()
        assert not re.search(r"class \w*Plan\b|\bplan_of\b|(?<!\")\barms?\b(?!\")", source), path
