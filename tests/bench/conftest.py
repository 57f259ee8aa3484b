from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.process import ServerProcess, write_server_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can chat, with room for whole prompts."""
    return write_server_folder(tmp_path_factory.mktemp("models") / "bench")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[ServerProcess]:
    """A server of it, for those who measure one."""
    with ServerProcess(folder) as process:
        yield process
