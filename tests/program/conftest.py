from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foretell import LLM
from foretell import program as fp
from tests.server.process import ServerProcess, write_server_folder
from tests.waiting import wait_for


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for a program."""
    return write_server_folder(tmp_path_factory.mktemp("models") / "program")


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[fp.Engine]:
    """Without a drafter, so that forwards can be counted."""
    with fp.Engine(folder, drafter="none", quiet=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def guessing(folder: Path) -> Iterator[fp.Engine]:
    """With one that always guesses."""
    with fp.Engine(folder, drafter="ngram", num_speculative_tokens=4, quiet=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def llm(folder: Path) -> LLM:
    """The same model, to be called by hand."""
    return LLM(folder, drafter="none", quiet=True)


@pytest.fixture(scope="session")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(folder, slowed=tmp_path_factory.mktemp("server") / "slowed") as process:
        yield process


@pytest.fixture(scope="session")
def endpoint(server: ServerProcess) -> Iterator[fp.RuntimeEndpoint]:
    with fp.RuntimeEndpoint(server.url) as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def pages_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, nothing is left behind."""
    yield
    for name in ("engine", "guessing"):
        if name in request.fixturenames:
            inner = request.getfixturevalue(name).llm.engine
            # What was given up ends with its step.
            wait_for(lambda inner=inner: not inner.busy and inner.runner.pool.held == 0)
            inner.runner.pool.check()
