"""Client packages from PyPI against the real server, in a network namespace that has loopback only.

Each script in `scripts/` does one task with one client and fails by an exception.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.install import python_with
from tests.clients.scripted_server import ScriptedServer

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "scripts"
# The packages of each script. What these depend on is the newest version that they allow.
PACKAGES = {
    "openai": ("openai==3.51.0",),
    "anthropic": ("anthropic==2.10.0",),
    "ollama": ("ollama==0.6.3",),
    "llm": ("llm==0.36",),
    "litellm": ("litellm==1.106.2", "mcp"),
    "langchain": ("langchain-openai==1.7.3", "langchain-anthropic==1.7.7", "langchain-ollama==1.1.0"),
    "instructor": ("instructor==1.17.0",),
    "pydantic_ai": ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "dspy": ("dspy==3.4.1",),
}
# Switches against telemetry and downloads; no client has a network anyway.
QUIET = {
    "ANONYMIZED_TELEMETRY": "False",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
WITHOUT_TOOLS = ("instructor", "dspy")  # a tool is called for its arguments alone, or never


@pytest.mark.parametrize("name", PACKAGES)
def test_a_client_does_its_task(scripted: ScriptedServer, tmp_path: Path, name: str) -> None:
    python = python_with(name, *PACKAGES[name])
    words = [str(python), str(SCRIPTS / f"with_{name}.py"), scripted.url]
    scripted.run(tmp_path, words, **QUIET)
    if name not in WITHOUT_TOOLS:
        called = [turn for turn in scripted.turns() if "read_notes" in turn["text"]]
        assert called and any(turn["result"] for turn in scripted.turns()), scripted.turns()
