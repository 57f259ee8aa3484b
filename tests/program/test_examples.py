"""The examples and the page about programs run as they stand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import jsonschema
import pytest

from foretell import program as fp
from foretell.program.backend import DEFAULT
from tests.docs_check import ROOT, snippets

EXAMPLES = ROOT / "examples" / "programs"
PAGE = ROOT / "docs" / "how-to" / "programs.md"


def example(name: str) -> dict[str, Any]:
    return run_path(str(EXAMPLES / f"{name}.py"))


@pytest.fixture(scope="module")
def real() -> Iterator[fp.Engine]:
    with fp.Engine(quiet=True) as engine:
        yield engine


@pytest.fixture(params=["engine", pytest.param("real", marks=pytest.mark.weights)])
def backend(request: pytest.FixtureRequest) -> fp.Engine:
    """Return the tiny model, whose output is noise, and the default one."""
    found: fp.Engine = request.getfixturevalue(request.param)
    return found


def test_tips_branch_and_come_together(backend: fp.Engine) -> None:
    state = example("tips")["suggest"]("tea", ["Boil water.", "Wait."], backend=backend, seed=1)
    assert len(state["detail"]) == 2 and all(detail in state.text() for detail in state["detail"])
    assert state.text().endswith("In short," + state["summary"])


def test_letters_become_json(backend: fp.Engine) -> None:
    found = example("extract")
    states = found["extract"].run_batch([{"letter": letter} for letter in found["LETTERS"]], backend=backend)
    assert [state.error() for state in states] == [None] * 3
    for state in states:
        jsonschema.validate(state.ret_value, found["SCHEMA"])


def test_thoughts_are_put_to_a_vote(backend: fp.Engine) -> None:
    answers = ["8", "10", "12"]
    solve = example("thoughts")["solve"]
    voted = solve("How many?", answers, backend=backend, seed=3)
    assert voted in answers
    assert voted == solve("How many?", answers, backend=backend, seed=3)


def test_an_example_is_a_script(
    engine: fp.Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fp, "Engine", lambda **options: engine)
    monkeypatch.setattr(DEFAULT, "_backend", None)
    monkeypatch.setattr(sys, "argv", ["example"])
    for script in sorted(EXAMPLES.glob("*.py")):
        run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out.strip(), script.name


@pytest.mark.weights
def test_the_page_runs(
    real: fp.Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(fp, "Engine", lambda *args, **options: real)  # one is enough
    monkeypatch.setattr(DEFAULT, "_backend", None)
    names: dict[str, Any] = {}
    *blocks, last = snippets(PAGE, "python")
    for code in blocks:
        exec(compile(code, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert "It is best described as" in said and ('"Oslo"' in said or '"Lisbon"' in said)
    assert DEFAULT.get() is real
    exec(compile(last, str(PAGE), "exec"), names)
    DEFAULT.get().close()
    assert isinstance(DEFAULT.get(), fp.RuntimeEndpoint)
