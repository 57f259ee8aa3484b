"""The README's commands and Python run on the default model."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.docs_check import ROOT, commands, faults, snippets
from tests.waiting import TIMEOUT

README = ROOT / "README.md"
RUNNABLE = [
    line for line in commands(README) if "foretell " in line and not re.search("foretell (certify|serve|bench)", line)
]
LONG = 600  # seconds; each takes a fraction of this
SERVERS = [line for line in commands(README) if line.startswith("foretell serve")]


def test_the_docs_are_true_to_the_code() -> None:
    assert not list(faults())


def test_the_docs_check_can_fail() -> None:
    from tests.docs_check import command_faults

    for wrong in ("make nothing", "foretell generate hi --no-such-flag 3", "foretell fly", "python bench/none.py"):
        assert list(command_faults(wrong, {"demo"})), wrong


@pytest.mark.weights
@pytest.mark.parametrize("command", RUNNABLE)
def test_the_readmes_commands_run(command: str) -> None:
    line = command.replace("foretell ", f"{sys.executable} -m foretell ")
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=LONG, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.weights
@pytest.mark.parametrize("command", SERVERS)
def test_the_readmes_servers_answer_and_stop(command: str) -> None:
    port = free_port()
    words = [sys.executable, "-m", *shlex.split(command), "--port", str(port)]  # the last one counts
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG) as client:
            wait_until_well(client, process)
            messages = [{"role": "user", "content": "Name three primary colours."}]
            reply = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8})
            assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"], reply.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_well(client: httpx.Client, process: subprocess.Popen[bytes], seconds: float = LONG) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, "it left before it was asked"
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"not well within {seconds:g} seconds")


def test_the_readme_serves() -> None:
    assert SERVERS and RUNNABLE, "or the tests above test nothing"


@pytest.mark.weights
def test_the_readmes_python_runs(tmp_path: Path) -> None:
    said = []
    for code in snippets(README, "python"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert "steps for" in said[0]
    assert set(json.loads(said[1])) >= {"city", "age"}


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("page", [README, *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: page.name)
def test_the_docs_certificates_pass(page: Path) -> None:
    for command in (line for line in commands(page) if line.startswith("foretell certify")):
        words = [sys.executable, "-m", *shlex.split(command)]
        if "--quick" not in words:
            words.append("--quick")  # the full run takes a quarter of an hour
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=ROOT)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_wheel_builds_and_runs_elsewhere(tmp_path: Path) -> None:
    """Install the wheel in a folder without a checkout and run its command."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("foretell-*.whl")
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); from foretell.cli.main import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "foretell 0." in done.stdout, done.stderr


def test_make_reports_an_old_python_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.4" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "-s", f"PYTHON={old}", f"VENV={tmp_path}/venv", "setup"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode != 0
    assert "Python 3.10.4 is too old; install Python 3.11 or newer" in done.stdout
    assert not (tmp_path / "venv").exists()
