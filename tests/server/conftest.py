from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from foretell.build.engine_builder import Assembly, build_engine
from foretell.config import EngineConfig, SpeculationConfig
from tests.server.process import ServerProcess, write_server_folder

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny model with a chat template for tools and reasoning."""
    return write_server_folder(tmp_path_factory.mktemp("models") / "server")


@pytest.fixture(scope="session")
def assembly(folder: Path) -> Assembly:
    """Build an engine in this process."""
    return build_engine(EngineConfig(model=str(folder)), SpeculationConfig())


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[ServerProcess]:
    """Start a server with default settings."""
    with ServerProcess(folder) as process:
        yield process


@pytest.fixture(scope="session")
def strict_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server with keys, small limits and a request log, configured by a file."""
    place = tmp_path_factory.mktemp("strict")
    config = place / "serve.yaml"
    keys = "".join(f"\n  - {key}" for key in KEYS)
    config.write_text(
        f"api_key:{keys}\nmax_body_bytes: 20000\nmax_n: 2\nmax_stop: 2\nmax-queue: 2\nmax_num_seqs: 2\n"
        f"max_schema_bytes: 500\nrequest_timeout: 60\nbody_timeout: 1\nlog_interval: 0.5\nlog_format: json\n"
        f"strict_fields: true\nstrict_max_tokens: true\nmetrics_names: both\n"
        f"per_request_spec_decode_metrics: detailed\nlog_requests: {place / 'requests.jsonl'}\n"
        f"seed: 7\nspeculative_config:\n  method: ngram\n  num_speculative_tokens: 4\n"
    )
    with ServerProcess(folder, "--config", str(config), slowed=place / "slowed") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
