from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.process import ServerProcess, write_server_folder

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install '.[cluster]'")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny model with a chat template for tools and reasoning."""
    return write_server_folder(tmp_path_factory.mktemp("models") / "server")


@pytest.fixture(scope="package")  # Ray must not run alongside the tests that follow
def server(folder: Path) -> Iterator[ServerProcess]:
    """Start a server with two replicas."""
    with ServerProcess(folder, "--replicas", "2", "--health-check-period", "1") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
