"""A server in a network namespace that has loopback only, and clients that run in it.

The tiny model writes a script, because it cannot do an agent's work: a call that reads a file, then an answer. What is
tested is the protocol: the list of models, the prompt and its tools, the stream, the tool call, its result, the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ServerProcess, _change, write_server_folder

CONTEXT = 262_144  # tokens; the tiny tokenizer makes three to four times as many of a prompt as a usual one
LONG = 300  # seconds; each client takes a fraction of this
NOTES = "the word is walnut\n"
ANSWER = "The word is walnut."
QUESTION = "Which word do the notes have?"
IN_NAMESPACE = ["unshare", "-r", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
# Scripted output of a chat: the first call whose tool and arguments the request offers, until the history has the
# notes; then the structured output that the request asks for, or the answer.
SCRIPTED = """
import json, sys
from foretell.cli.main import main
from foretell.server.preprocess import RequestPreprocessor
from foretell.structured_output import GrammarSpec

reading, final, answer = json.loads(sys.argv.pop(1))
transcript = sys.argv.pop(1)

def offered(calls, tools):
    parameters = {tool.function.name: (tool.function.parameters or {}).get("properties", {}) for tool in tools}
    fits = (call for call in calls if set(call["arguments"]) <= set(parameters.get(call["name"], ())))
    return next((f"<tool_call>{json.dumps(call)}</tool_call>" for call in fits), None)

def scripted(preprocessor, body, tools, *more):
    has_result = any(message.role == "tool" and "walnut" in str(message.content) for message in body.messages)
    text = (None if has_result else offered(reading, tools)) or offered(final, tools) or answer
    if text == answer and "[[ ## completed ## ]]" in str(body.messages):  # the format of dspy
        text = "[[ ## answer ## ]]\\nwalnut\\n\\n[[ ## completed ## ]]"
    if text == answer and body.response_format is not None and body.response_format.type != "text":
        text = '{"word": "walnut"}'
    with open(transcript, "a") as file:
        print(json.dumps({"text": text, "tools": len(tools), "stream": body.stream, "result": has_result}), file=file)
    return GrammarSpec.choice((text,))

RequestPreprocessor._chat_grammar = scripted
sys.exit(main())
"""


@dataclass(frozen=True)
class ScriptedServer:
    """A server with a scripted model, and what its model wrote."""

    process: ServerProcess
    notes: Path  # the file that the model reads
    transcript: Path

    @property
    def url(self) -> str:
        return self.process.url

    def run(self, home: Path, words: list[str], *, fails: bool = False, **variables: str) -> str:
        """Run a client in the server's namespace, with an empty home next to the notes; return what it prints."""
        enter = ["nsenter", f"--target={self.process.process.pid}", "--user", "--net", "--preserve-credentials"]
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
        self.transcript.write_text("")
        done = subprocess.run(
            [*enter, *words],
            capture_output=True,
            text=True,
            timeout=LONG,
            cwd=self.notes.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr if fails else done.stdout

    def turns(self) -> list[dict[str, Any]]:
        """Return what the model wrote in each chat since the last client was started."""
        return [json.loads(line) for line in self.transcript.read_text().splitlines()]

    def check_tool_round_trip(self, *, stream: bool = True) -> None:
        """Check that a tool was called, and that the chat with its result was answered."""
        turns = [turn for turn in self.turns() if turn["tools"]]
        called = [turn for turn in turns if not turn["result"]]
        answered = [turn for turn in turns if turn["result"]]
        assert called and called[0]["text"].startswith("<tool_call>"), turns
        assert answered and answered[-1]["text"] == ANSWER, turns
        assert all(bool(turn["stream"]) == stream for turn in (called[0], answered[-1])), turns


@contextmanager
def scripted_server(folder: Path, context: int = CONTEXT) -> Iterator[ScriptedServer]:
    """Start a server whose model reads the notes by the tool of a client and then answers; skip without a namespace."""
    if subprocess.run([*IN_NAMESPACE, "true"], capture_output=True).returncode != 0:
        pytest.skip("no network namespace can be created here")
    model, notes, transcript = (
        write_server_folder(folder / "agent"),
        folder / "work" / "notes.txt",
        folder / "transcript",
    )
    notes.parent.mkdir()
    notes.write_text(NOTES)
    transcript.touch()
    _change(model / "config.json", max_position_embeddings=context)
    final = [{"name": name, "arguments": {"word": "walnut"}} for name in ("Notes", "PartialNotes", "final_result")]
    script = json.dumps([_reading_calls(notes), final, ANSWER])
    command = [*IN_NAMESPACE, sys.executable, "-c", SCRIPTED, script, str(transcript), "serve"]
    with ServerProcess(model, command=command) as process:
        yield ScriptedServer(process, notes, transcript)


def _reading_calls(notes: Path) -> list[dict[str, Any]]:
    """Return the calls that read the notes, by the tool of each client and its argument."""
    arguments = (
        ("Read", "file_path"),  # Claude Code
        ("exec_command", "cmd"),  # Codex
        ("read", "filePath"),  # opencode
        ("Read", "filepath"),  # Continue
        ("read_file", "file_path"),  # qwen-code
        ("read_notes", "path"),  # the scripts of Python clients
    )
    return [
        {"name": tool, "arguments": {name: f"cat {notes}" if name == "cmd" else str(notes)}} for tool, name in arguments
    ]
