"""Claude Code and Codex against the real server, in a network namespace that has loopback only.

The tiny model writes a script, because it cannot do an agent's work: a call that reads a file, then an answer. What is
tested is the protocol: the prompt and its tools, the stream, the tool call, its result, and the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.process import ServerProcess, _change, write_server_folder

pytestmark = pytest.mark.slow
VERSIONS = {"@anthropic-ai/claude-code": "2.1.197", "@openai/codex": "0.169.0"}
CONTEXT = 262_144  # tokens; the tiny tokenizer makes three to four times as many of a prompt as a usual one
LONG = 300  # seconds; each takes a fraction of this
ANSWER = "The word is walnut."
IN_NAMESPACE = ["unshare", "-r", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
SCRIPTED = """
import json, sys
from foretell.cli.main import main
from foretell.server.preprocess import RequestPreprocessor
from foretell.structured_output import GrammarSpec

calls, answer = json.loads(sys.argv.pop(1)), sys.argv.pop(1)

def scripted(preprocessor, body, tools, *more):
    names = [tool.function.name for tool in tools]
    call = next((call for call in calls if call["name"] in names), None)
    has_result = any(message.role == "tool" and "walnut" in str(message.content) for message in body.messages)
    text = answer if has_result or call is None else "<tool_call>" + json.dumps(call) + "</tool_call>"
    return GrammarSpec.choice((text,))

RequestPreprocessor._chat_grammar = scripted
sys.exit(main())
"""
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


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the clients from npm; return the folder of their commands."""
    folder = tmp_path_factory.mktemp("npm")
    names = [f"{name}@{version}" for name, version in VERSIONS.items()]
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    words = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *names]
    if subprocess.run(words, capture_output=True, timeout=LONG).returncode != 0:
        pytest.skip("npm cannot install the clients")
    package = folder / "node_modules" / "@anthropic-ai" / "claude-code"
    subprocess.run(["node", "install.cjs"], cwd=package, check=True, capture_output=True, timeout=LONG)
    return folder / "node_modules" / ".bin"


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("work") / "notes.txt"
    file.write_text("the word is walnut\n")
    return file


@pytest.fixture(scope="module")
def scripted_server(notes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server in a network namespace whose model reads the notes and then answers."""
    if subprocess.run([*IN_NAMESPACE, "true"], capture_output=True).returncode != 0:
        pytest.skip("no network namespace can be created here")
    folder = write_server_folder(tmp_path_factory.mktemp("models") / "agent")
    _change(folder / "config.json", max_position_embeddings=CONTEXT)
    calls = [
        {"name": "Read", "arguments": {"file_path": str(notes)}},
        {"name": "exec_command", "arguments": {"cmd": f"cat {notes}"}},
    ]
    command = [*IN_NAMESPACE, sys.executable, "-c", SCRIPTED, json.dumps(calls), ANSWER, "serve"]
    with ServerProcess(folder, command=command) as process:
        yield process


def run_client(server: ServerProcess, home: Path, notes: Path, words: list[str], **variables: str) -> str:
    """Run a client in the server's namespace, with an empty home; return what it prints."""
    enter = ["nsenter", f"--target={server.process.pid}", "--user", "--net", "--preserve-credentials"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    done = subprocess.run(
        [*enter, *words],
        capture_output=True,
        text=True,
        timeout=LONG,
        cwd=notes.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_claude_code_reads_a_file_and_answers(
    packages: Path, scripted_server: ServerProcess, notes: Path, tmp_path: Path
) -> None:
    switches = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
    variables = dict.fromkeys((*switches, "DISABLE_ERROR_REPORTING"), "1")
    variables |= {"ANTHROPIC_BASE_URL": scripted_server.url, "ANTHROPIC_API_KEY": "any", "ANTHROPIC_MODEL": "tiny"}
    variables |= {"ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000"}
    words = [str(packages / "claude"), "-p", "Which word do the notes have?", "--allowedTools", "Read"]
    printed = run_client(
        scripted_server, tmp_path, notes, [*words, "--output-format", "json", "--verbose"], **variables
    )
    result = json.loads(printed)[-1]
    assert result["result"] == ANSWER and result["is_error"] is False and result["num_turns"] == 2
    usage = result["usage"]
    assert usage["cache_read_input_tokens"] > 0.9 * usage["input_tokens"], "the second turn's prompt is cached"


def test_codex_reads_a_file_and_answers(
    packages: Path, scripted_server: ServerProcess, notes: Path, tmp_path: Path
) -> None:
    config = tmp_path / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(CODEX_CONFIG.format(url=scripted_server.url))
    words = [str(packages / "codex"), "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    printed = run_client(scripted_server, tmp_path, notes, [*words, "Which word do the notes have?"], LOCAL_KEY="any")
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["aggregated_output"] for item in items if item["type"] == "command_execution"] == [notes.read_text()]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [ANSWER]
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["cached_input_tokens"] > 0
