"""Programs written for SGLang run with another import and nothing else."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from foretell import program as fp
from foretell.program.backend import DEFAULT
from tests.program.article import ADDRESS, FIRST, OURS, SECOND, THEIRS
from tests.program.counting import all_at_once, forwards
from tests.server.process import ServerProcess

PROMPTS = ["Write a sort function.", "Write a hash function.", "Write a search function."]


@pytest.fixture
def their_address(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve at the address that the program expects."""
    port, connect = int(server.url.rsplit(":", 1)[1]), socket.socket.connect

    def elsewhere(self: socket.socket, address: Any) -> None:
        connect(self, (address[0], port, *address[2:]) if address[1] == ADDRESS[1] else address)

    monkeypatch.setattr(socket.socket, "connect", elsewhere)
    monkeypatch.setattr(DEFAULT, "_backend", None)


def test_both_programs_run(their_address: None, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    program = (FIRST + SECOND).replace(THEIRS, OURS)
    names: dict[str, Any] = {}
    before = server.metrics()["foretell:generation_tokens_total"]
    try:
        exec(compile(program, "article.py", "exec"), names)
    finally:
        DEFAULT.get().close()
    assert isinstance(DEFAULT.get(), fp.RuntimeEndpoint)
    said = capsys.readouterr().out
    assert len(names["results"]) == 3 and all(said.count(f"{prompt}\n") for prompt in PROMPTS)
    assert all(f"{prompt}\n{text}\n---" in said for prompt, text in zip(PROMPTS, names["results"], strict=True))
    assert server.metrics()["foretell:generation_tokens_total"] > before


def article(engine: fp.Engine) -> Any:
    """The second program, in process."""
    names: dict[str, Any] = {"sgl": fp}
    exec(compile(SECOND.split("# SGLang will")[0], "article.py", "exec"), names)
    return names["batch_code_gen"]


@fp.function
def forked(s: fp.ProgramState, prompts: list[str]) -> list[str]:
    """The form of docs/how-to/programs.md."""
    forks = s.fork(len(prompts))
    for branch, prompt in zip(forks, prompts, strict=True):
        branch += f"\nPrompt: {prompt}" + fp.gen("response", max_new_tokens=128)
    return [branch["response"] for branch in forks]


def test_the_second_is_serial_as_written_and_one_batch_when_forked(engine: fp.Engine) -> None:
    options = {"backend": engine, "ignore_eos": True}
    with forwards(engine) as serial:
        article(engine)(prompts=PROMPTS, **options)
    with forwards(engine) as at_once, all_at_once(engine, len(PROMPTS)):
        forked(prompts=PROMPTS, **options)
    assert serial.made == 3 * 128
    assert at_once.made == 128
