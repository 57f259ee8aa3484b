"""Coding agents from npm against the real server, in a network namespace that has loopback only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.install import npm_command
from tests.clients.scripted_server import ANSWER, CONTEXT, NOTES, QUESTION, ScriptedServer, scripted_server

pytestmark = pytest.mark.slow
SMALL_CONTEXT = 1024  # tokens
CODEX_CONFIG = """
model = "tiny"
model_provider = "local"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
"""
CONTINUE_CONFIG = """
name: local
version: 1.0.0
schema: v1
models:
  - name: tiny
    provider: openai
    model: tiny
    apiBase: {url}/v1
    apiKey: any
    roles: [chat]
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server whose context no agent's prompt fits into."""
    with scripted_server(tmp_path_factory.mktemp("small"), SMALL_CONTEXT) as server:
        yield server


Command = tuple[list[str], dict[str, str]]  # words and environment variables


def claude_code(server: ScriptedServer, home: Path, version: str = "2.1.328") -> Command:
    claude = npm_command("claude", "@anthropic-ai/claude-code", version, "install.cjs")
    switches = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
    variables = dict.fromkeys((*switches, "DISABLE_ERROR_REPORTING"), "1")
    variables |= {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "any", "ANTHROPIC_MODEL": "tiny"}
    variables |= {"ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000"}
    words = [str(claude), "-p", QUESTION, "--allowedTools", "Read", "--output-format", "json", "--verbose"]
    return words, variables


def codex(server: ScriptedServer, home: Path) -> Command:
    command = npm_command("codex", "@openai/codex", "0.169.0")
    config = home / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(CODEX_CONFIG.format(url=server.url))
    words = [str(command), "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION]
    return words, {"LOCAL_KEY": "any"}


def opencode(server: ScriptedServer, home: Path) -> Command:
    command = npm_command("opencode", "opencode-ai", "1.18.33", "postinstall.mjs")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "any"},
        "models": {"tiny": {"name": "tiny", "limit": {"context": CONTEXT, "output": 4000}}},
    }
    settings = {"model": "local/tiny", "small_model": "local/tiny", "autoupdate": False, "share": "disabled"}
    config = home / "opencode.json"
    config.write_text(json.dumps({**settings, "provider": {"local": provider}}))
    switches = ("OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_LSP_DOWNLOAD")
    variables = dict.fromkeys((*switches, "OPENCODE_DISABLE_DEFAULT_PLUGINS"), "1")
    return [str(command), "run", "--format", "json", QUESTION], {**variables, "OPENCODE_CONFIG": str(config)}


def continue_cli(server: ScriptedServer, home: Path) -> Command:
    command = npm_command("cn", "@continuedev/cli", "1.5.47")
    config = home / "config.yaml"
    config.write_text(CONTINUE_CONFIG.format(url=server.url))
    switches = ("CONTINUE_METRICS_ENABLED", "CONTINUE_CLI_ENABLE_TELEMETRY", "CONTINUE_TELEMETRY_ENABLED")
    words = [str(command), "--config", str(config), "-p", "--format", "json", "--allow", "Read", QUESTION]
    return words, dict.fromkeys(switches, "0")


def qwen_code(server: ScriptedServer, home: Path) -> Command:
    command = npm_command("qwen", "@qwen-code/qwen-code", "0.24.4")
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    }
    file = home / ".qwen" / "settings.json"
    file.parent.mkdir()
    file.write_text(json.dumps(settings))
    variables = {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_MODEL": "tiny"}
    return [str(command), "-p", QUESTION, "--output-format", "json", "--auth-type", "openai"], variables


@pytest.mark.parametrize("version", ["2.1.197", "2.1.328"])
def test_claude_code_reads_a_file_and_answers(scripted: ScriptedServer, tmp_path: Path, version: str) -> None:
    words, variables = claude_code(scripted, tmp_path, version)
    result = json.loads(scripted.run(tmp_path, words, **variables))[-1]
    assert result["result"] == ANSWER and result["is_error"] is False and result["num_turns"] == 2
    usage = result["usage"]
    assert usage["cache_read_input_tokens"] > 0.9 * usage["input_tokens"], "the second turn's prompt is cached"
    scripted.check_tool_round_trip()


def test_codex_reads_a_file_and_answers(scripted: ScriptedServer, tmp_path: Path) -> None:
    words, variables = codex(scripted, tmp_path)
    printed = scripted.run(tmp_path, words, **variables)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["aggregated_output"] for item in items if item["type"] == "command_execution"] == [NOTES]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [ANSWER]
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["cached_input_tokens"] > 0
    scripted.check_tool_round_trip()


def test_opencode_reads_a_file_and_answers(scripted: ScriptedServer, tmp_path: Path) -> None:
    words, variables = opencode(scripted, tmp_path)
    parts = [json.loads(line)["part"] for line in scripted.run(tmp_path, words, **variables).splitlines()]
    tools = [part["state"] for part in parts if part["type"] == "tool"]
    assert [state["status"] for state in tools] == ["completed"] and NOTES.strip() in tools[0]["output"]
    assert [part["text"] for part in parts if part["type"] == "text"] == [ANSWER]
    assert [part["reason"] for part in parts if part["type"] == "step-finish"] == ["tool-calls", "stop"]
    scripted.check_tool_round_trip()


def test_continue_reads_a_file_and_answers(scripted: ScriptedServer, tmp_path: Path) -> None:
    words, variables = continue_cli(scripted, tmp_path)
    result = json.loads(scripted.run(tmp_path, words, **variables).splitlines()[-1])
    assert result["response"] == ANSWER and result["status"] == "success"
    scripted.check_tool_round_trip()


def test_qwen_code_reads_a_file_and_answers(scripted: ScriptedServer, tmp_path: Path) -> None:
    words, variables = qwen_code(scripted, tmp_path)
    events = json.loads(scripted.run(tmp_path, words, **variables).splitlines()[-1])
    results = [block for event in events if event["type"] == "user" for block in event["message"]["content"]]
    assert [block["content"] for block in results] == [NOTES] and not results[0]["is_error"]
    assert events[-1]["subtype"] == "success" and events[-1]["result"] == ANSWER
    scripted.check_tool_round_trip()


# What each agent says when its prompt exceeds the context; those that know the server's error say it in their words.
TOO_SMALL = {
    claude_code: "Prompt is too long",
    codex: "ran out of room in the model's context window",
    opencode: "ContextOverflowError",
    continue_cli: f"maximum context length is {SMALL_CONTEXT} tokens",
    qwen_code: f"maximum context length is {SMALL_CONTEXT} tokens",
}


@pytest.mark.parametrize("agent", TOO_SMALL)
def test_a_context_too_small_for_the_prompt_is_reported(
    small: ScriptedServer, tmp_path: Path, agent: Callable[[ScriptedServer, Path], Command]
) -> None:
    words, variables = agent(small, tmp_path)
    assert TOO_SMALL[agent] in small.run(tmp_path, words, fails=True, **variables)
