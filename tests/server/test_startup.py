"""What a server prints when it is ready, and errors of its address."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from foretell.errors import RequestError
from foretell.server.memory_report import MemoryReport
from foretell.server.run import bind
from foretell.server.startup import Startup, announce
from tests.server.process import ServerProcess

MEMORY = MemoryReport(weights=1 << 30, drafter=0, cache=1 << 29, pages=64, activations=1, process=1 << 28)
READY = Startup("127.0.0.1", 8000, "tiny", ("suffix", "eagle"), "drafters suffix, eagle with 4 draft tokens", MEMORY)


def test_a_terminal_gets_a_banner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    announce(READY, "text")
    shown = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    for words in ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/docs", "tiny", "suffix, eagle", "KV cache of 64"):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 80 and len(shown.splitlines()) < 12


def test_all_interfaces_are_reached_by_this_machines_address() -> None:
    rows = dict(Startup("0.0.0.0", 80, "tiny", (), "no drafters", MEMORY).rows())
    assert rows["page"] == "http://127.0.0.1:80/" and rows["listens on"] == "all interfaces, port 80"
    assert dict(Startup("::", 80, "tiny", (), "", MEMORY).rows())["page"] == "http://[::1]:80/"
    assert Startup("::1", 80, "tiny", (), "", MEMORY).rows()[0] == ("page", "http://[::1]:80/")


def test_a_pipe_gets_one_line_and_json_logs_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    announce(READY, "text")
    assert capsys.readouterr().out.startswith("foretell: http://127.0.0.1:8000 serves tiny; drafters suffix, eagle")
    announce(READY, "json")
    line = capsys.readouterr().out
    found = json.loads(line)
    assert line.count("\n") == 1 and found["message"].startswith("foretell: http://127.0.0.1:8000")
    assert (found["url"], found["drafters"]) == ("http://127.0.0.1:8000", ["suffix", "eagle"])


def test_json_logs_have_nothing_but_objects(folder: Path) -> None:
    with ServerProcess(folder, "--quantization", "int8", "--log-format", "json", "--enforce-eager") as server:
        lines = [json.loads(line)["message"] for line in server.log.read_text().splitlines()]
    assert any("quantization: int8" in line for line in lines) and any("--enforce-eager" in line for line in lines)


def test_an_address_of_another_machine_is_the_hosts_fault() -> None:
    with pytest.raises(RequestError, match="192.0.2.1 is no address of this machine") as refused:
        bind("192.0.2.1", 0)
    assert refused.value.field == "host"
