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
    """Return a tiny model with a context long enough for programs."""
    return write_server_folder(tmp_path_factory.mktemp("models") / "program")


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[fp.Engine]:
    """Return an engine without a drafter, so that forwards can be counted."""
    with fp.Engine(folder, drafter="none", quiet=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def speculating(folder: Path) -> Iterator[fp.Engine]:
    """Return an engine that always drafts."""
    with fp.Engine(folder, drafter="ngram", num_speculative_tokens=4, quiet=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def llm(folder: Path) -> LLM:
    """Return an LLM of the same model."""
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
def all_pages_are_freed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no test leaks KV pages."""
    yield
    for name in ("engine", "speculating"):
        if name in request.fixturenames:
            inner = request.getfixturevalue(name).llm.engine
            # A cancelled generation ends with its step.
            wait_for(lambda inner=inner: not inner.busy and inner.runner.pool.num_held == 0)
            inner.runner.pool.check()
