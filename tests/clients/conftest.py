from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.scripted_server import ScriptedServer, scripted_server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server in a network namespace whose model reads the notes and then answers."""
    with scripted_server(tmp_path_factory.mktemp("scripted")) as server:
        yield server
