"""The commands and the Python of the README and the docs run on the default model, and the site builds."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs_check import ROOT, command_faults, commands, faults, snippets, unknown_flags
from tests.waiting import TIMEOUT

README = ROOT / "README.md"
DOCS = [page for page in sorted(ROOT.glob("docs/**/*.md")) if page.parent.name != "log"]
PROGRAMS = ROOT / "docs" / "how-to" / "programs.md"  # tests/program/test_examples.py runs it
LONG = 600  # seconds; each takes a fraction of this
README_LINES, README_WIDTH, PROSE_WIDTH = 150, 160, 200
# What a command needs that is not here: a file of the reader's, a server, a model from Hugging Face, the cluster extra.
ELSEWHERE = re.compile(
    r"\b(FILE|FOLDER|DIR|URL)\b|://|\.(jsonl|yaml|gguf)|\./|my-|-hf |-model d |--replicas"
    r"|(^|[ :])[A-Za-z][\w-]*/[A-Z]"
)
# Run by other tests, or for too long.
OWN_TESTS = re.compile(r"foretell (plan|certify|serve|train|tune|export|deploy|bench (?!.*--quick))")


def foretell_commands(pages: list[Path]) -> list[str]:
    found = dict.fromkeys(line for page in pages for line in commands(page) if re.match(r"(.*\| )?foretell ", line))
    return [line for line in found if not ELSEWHERE.search(line)]


QUICK = [line for line in foretell_commands([README]) if re.search("foretell (generate|plan)", line)]
SERVERS = [line for line in foretell_commands([README]) if line.startswith("foretell serve")]
ALL = foretell_commands([README, *DOCS])
OTHERS = [line for line in ALL if line not in QUICK and not OWN_TESTS.search(line)]
OTHER_SERVERS = [line for line in ALL if line.startswith("foretell serve") and line not in SERVERS]
PYTHON_PAGES = [page for page in DOCS if snippets(page, "python") and page != PROGRAMS]


def test_the_docs_are_true_to_the_code() -> None:
    assert not list(faults())


def test_the_docs_check_can_fail(tmp_path: Path) -> None:
    for wrong in ("make nothing", "foretell generate hi --no-such-flag 3", "foretell fly", "python bench/none.py"):
        assert list(command_faults(wrong, {"demo"})), wrong
    page = tmp_path / "page.md"
    page.write_text("Use `--drafter` and `foretell serve --no-such-flag`.\n")
    assert unknown_flags(page) == ["--no-such-flag"]


def test_the_readme_fits_its_limits() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= README_LINES
    assert not [line for line in lines if len(line) > README_WIDTH]


def test_lines_of_prose_are_short() -> None:
    others = [ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("foretell/heads_data/**/README.md")]
    for page in [*DOCS, *others]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        long = [line for line in prose.splitlines() if len(line) > PROSE_WIDTH and not line.startswith("|")]
        assert not long, page


def test_the_reference_pages_are_generated_from_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert generator().main(["--check"]) == 0, capsys.readouterr().out


def test_the_generator_finds_and_writes_a_stale_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = generator()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PAGES", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated speculation -->\nold\n<!-- end of speculation -->\nafter\n")
    assert module.main(["--check"]) == 1 and "old" in page.read_text(), "a check writes nothing"
    assert module.main([]) == 0 and module.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "| `--drafter` | `auto` |" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated speculation -->\nold\n", "<!-- generated speculation --> stands alone"),
        ("<!-- generated speculation -->\nold\n<!-- end of sampling -->\n", "stands alone"),
        ("old\n<!-- end of sampling -->\n", "<!-- end of sampling --> stands alone"),
        (
            "<!-- generated server -->\n<!-- generated sampling -->\n<!-- end of server -->\n",
            "<!-- generated sampling --> stands alone",
        ),
        ("<!-- generated nothing -->\nold\n<!-- end of nothing -->\n", "there is no part 'nothing'; known: commands"),
    ],
)
def test_the_generator_refuses_marks_that_are_no_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    module = generator()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PAGES", tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert module.main(["--check"]) == module.main([]) == 1
    assert (tmp_path / "page.md").read_text() == text
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(line.startswith("page.md: ") and message in line for line in said)


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, capture_output=True, text=True, cwd=tmp_path, timeout=LONG)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").glob("**/*.html"):
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(), flags=re.S)
        raw = re.search(r"\n- |\n\d+\. |<p>\||\| ?---", prose)  # a list or a table without an empty line before it
        assert raw is None or page.parent.name == "log", f"{page.name}: {prose[raw.start() - 60 : raw.end() + 60]}"
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]* (?:src|href)=\"(https?://[^\"]*)", page.read_text())
        assert not loaded, page.name


def test_every_page_is_in_the_navigation() -> None:
    def targets(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from (
                target for each in (entry.values() if isinstance(entry, dict) else entry) for target in targets(each)
            )

    listed = set(targets(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}


def run(command: str, cwd: Path) -> str:
    """Run a shell line with this checkout's `foretell` and return what it prints."""
    line = re.sub(r"(^|\| )foretell ", rf"\1{sys.executable} -m foretell ", command)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        line, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONG, cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.weights
@pytest.mark.parametrize("command", QUICK)
def test_the_readmes_commands_run(command: str, tmp_path: Path) -> None:
    assert run(command, tmp_path).strip()


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("command", OTHERS)
def test_the_docs_commands_run(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)


def test_the_commands_that_run_are_found() -> None:
    assert QUICK and SERVERS and OTHER_SERVERS and len(OTHERS) > 8, "or the tests around test nothing"
    assert "foretell demo" in OTHERS and "foretell chat" in OTHERS


@contextmanager
def serving(command: str) -> Iterator[httpx.Client]:
    """Start the server of a command line on a free port, wait until it is healthy, and stop it."""
    port = free_port()
    words = [sys.executable, "-m", *shlex.split(command), "--port", str(port)]  # the last one counts
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG) as client:
            wait_until_healthy(client, process)
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_healthy(client: httpx.Client, process: subprocess.Popen[bytes], seconds: float = LONG) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, "the server ended before the first request"
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"not healthy within {seconds:g} seconds")


@pytest.mark.weights
@pytest.mark.parametrize("command", [*SERVERS, *(pytest.param(line, marks=pytest.mark.slow) for line in OTHER_SERVERS)])
def test_the_servers_of_the_docs_answer_and_stop(command: str) -> None:
    with serving(command) as client:
        key = re.search(r"--api-key (\S+)", command)
        headers = {"Authorization": f"Bearer {key[1]}"} if key else {}
        messages = [{"role": "user", "content": "Name three primary colours."}]
        body = {"messages": messages, "max_tokens": 8}
        reply = client.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"], reply.text


@pytest.mark.weights
def test_the_readmes_python_runs(tmp_path: Path) -> None:
    printed = []
    for code in snippets(README, "python"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert "steps for" in printed[0]
    assert set(json.loads(printed[1])) >= {"city", "age"}


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with serving("foretell serve smollm2-135m") as client:
        yield client


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.stem)
def test_the_docs_python_runs(page: Path, server: httpx.Client, tmp_path: Path) -> None:
    """Run the snippets of a page in order, as one program; those of packages that are not installed are left out."""
    code = "\n".join(code for code in snippets(page, "python") if is_installed(code))
    script = tmp_path / "page.py"
    script.write_text(code.replace("localhost:8000", f"127.0.0.1:{server.base_url.port}"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=LONG, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def is_installed(code: str) -> bool:
    """Return whether the packages that a snippet imports are installed."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return all(importlib.util.find_spec(name.partition(".")[0]) for name in names)


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(
    "line", dict.fromkeys(line for page in DOCS for line in commands(page) if line.startswith("curl"))
)
def test_the_docs_requests_are_answered(line: str, server: httpx.Client, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    address = f"127.0.0.1:{server.base_url.port}"
    assert run(line.replace("curl localhost:8000", f"curl --fail --silent {address}"), tmp_path).strip()


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.name)
def test_the_docs_certificates_pass(page: Path) -> None:
    for command in (
        line for line in commands(page) if line.startswith("foretell certify") and not ELSEWHERE.search(line)
    ):
        words = [sys.executable, "-m", *shlex.split(command)]
        if "--quick" not in words:
            words.append("--quick")  # the full run takes a quarter of an hour
        if "--tokens" in words:
            words[words.index("--tokens") + 1] = "20000"  # 200,000 take over ten minutes on a busy machine
        done = subprocess.run(words, capture_output=True, text=True, timeout=LONG, cwd=ROOT)
        assert done.returncode == 0, done.stderr


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
