"""Downloads from a stand-in for Hugging Face on loopback: killed, cut short and damaged on the way."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

from foretell.errors import ModelError
from foretell.hub import huggingface as blobs
from foretell.hub.huggingface import verified
from tests.waiting import wait_for

REPO = Path(__file__).parents[2]
COMMITS = {"main": "0" * 40, "v1": "1" * 40}
CONFIG = b'{"model_type": "llama"}'
WEIGHTS = save({"a": torch.arange(6_000_000, dtype=torch.float32)})  # the library writes 10 MB at a time
OLD_WEIGHTS = save({"a": torch.zeros(1000)})
CHILD = """
import sys
from foretell.errors import ForetellError
from foretell.hub import resolve
try:
    print(resolve("own/tiny", revision=sys.argv[1] if len(sys.argv) > 1 else None))
except ForetellError as error:
    sys.exit(str(error))
"""


class Hub(ThreadingHTTPServer):
    """Answers as the real one does, as far as the library asks; can stall or damage the weights."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.stall = threading.Event()  # set: send half of the weights, then wait
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.damage = False
        self.sent = 0  # bytes of weights

    def content(self, commit: str, name: str) -> bytes:
        return CONFIG if name == "config.json" else WEIGHTS if commit == COMMITS["main"] else OLD_WEIGHTS

    def tree(self, commit: str) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for name in ("config.json", "model.safetensors"):
            content = self.content(commit, name)
            row: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
            if name != "config.json":
                hashed = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"oid": hashed, "size": len(content), "pointerSize": 100}
            rows.append(row)
        return rows


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not path.startswith(("/api/models/own/tiny", "/own/tiny/resolve/")):
            self.send_error(404)
            return
        if path.startswith("/api/models/own/tiny"):
            revision = path.rpartition("/")[2]
            commit = COMMITS.get(revision, revision)
            if "/tree/" in path:
                self.reply(json.dumps(self.server.tree(commit)).encode(), {})
                return
            files = [{"rfilename": name} for name in ("config.json", "model.safetensors")]
            self.reply(json.dumps({"id": "own/tiny", "sha": commit, "siblings": files}).encode(), {})
            return
        _, _, _, _, commit, name = path.split("/")
        content = self.server.content(COMMITS.get(commit, commit), name)
        hashed = hashlib.sha256(content).hexdigest()
        large = name != "config.json"
        git = git_hash(content)
        headers = {"ETag": f'"{hashed if large else git}"', "X-Repo-Commit": COMMITS.get(commit, commit)}
        if large and self.server.damage:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.reply(content, headers, large)

    def reply(self, content: bytes, headers: dict[str, str], large: bool = False) -> None:
        begin = 0
        if asked := self.headers.get("Range"):
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if asked else 200)
        if asked:
            headers |= {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        for key, value in (headers | {"Content-Length": str(len(content) - begin)}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        content = content[begin:]
        if large and self.server.stall.is_set():
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.released.wait(120)
            self.close_connection = True
            return
        self.server.sent += len(content) if large else 0
        self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def start(hub: Hub, home: Path, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "PYTHONPATH": str(REPO),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "FORETELL_HOME": str(home / "home"),
    }
    env.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", CHILD, *arguments]
    return subprocess.Popen(command, env=env, cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def fetched(hub: Hub, home: Path, *arguments: str) -> bytes:
    """The weights that a start ends with."""
    child = start(hub, home, *arguments)
    out, err = child.communicate()
    assert child.returncode == 0, err
    return (Path(out.strip()) / "model.safetensors").read_bytes()


def test_a_killed_download_is_resumed(hub: Hub, tmp_path: Path) -> None:
    hub.stall.set()
    child = start(hub, tmp_path)
    wait_for(hub.stalled.is_set)
    wait_for(lambda: [file for file in tmp_path.rglob("*.incomplete") if file.stat().st_size])
    child.kill()
    child.communicate()
    assert not list(tmp_path.rglob("model.safetensors")), "half a file has no name"
    hub.stall.clear()
    hub.released.set()
    assert fetched(hub, tmp_path) == WEIGHTS
    assert fetched(hub, tmp_path) == WEIGHTS
    assert not list((tmp_path / "home" / "fetching").iterdir())


def test_a_damaged_download_is_refused_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.damage = True
    child = start(hub, tmp_path)
    _, err = child.communicate()
    assert child.returncode == 1 and "own/tiny: a download has the hash" in err and len(err.splitlines()) == 1, err
    hub.damage = False
    assert fetched(hub, tmp_path) == WEIGHTS


def test_what_a_killed_start_left_unchecked_is_checked(hub: Hub, tmp_path: Path) -> None:
    """A process that dies between the end of a download and its check leaves the marker."""
    assert fetched(hub, tmp_path) == WEIGHTS
    marker = tmp_path / "home" / "fetching" / hashlib.sha256(b"own/tiny None").hexdigest()[:24]
    marker.touch()
    os.utime(marker, (1, 1))
    (blob,) = (tmp_path / "hub").rglob(hashlib.sha256(WEIGHTS).hexdigest())
    blob.write_bytes(WEIGHTS[:-1] + b"?")
    child = start(hub, tmp_path)
    assert "a download has the hash" in child.communicate()[1]
    assert fetched(hub, tmp_path) == WEIGHTS


def test_each_revision_has_its_own_files(hub: Hub, tmp_path: Path) -> None:
    assert fetched(hub, tmp_path, "v1") == OLD_WEIGHTS
    assert fetched(hub, tmp_path) == WEIGHTS
    assert fetched(hub, tmp_path, COMMITS["v1"]) == OLD_WEIGHTS
    assert hub.sent == len(WEIGHTS) + len(OLD_WEIGHTS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a repository's blobs."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--own--tiny" / "blobs"
    folder.mkdir(parents=True)
    return folder


def test_downloads_are_checked_without_a_folder_to_note_it(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    with pytest.raises(ModelError, match="a download has the hash"), verified("own/tiny", None):
        (cache / ("1" * 64)).write_bytes(b"wrong")
    assert not list(cache.iterdir())


def test_downloads_are_checked_when_another_process_ends_first(cache: Path) -> None:
    with pytest.raises(ModelError, match="a download has the hash"), verified("own/tiny", None):
        with verified("own/tiny", None):
            pass
        (cache / ("1" * 64)).write_bytes(b"wrong")


def test_blobs_that_another_process_removes_are_left_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "blobs", lambda repo: [cache / ("1" * 64), cache / ("2" * 64)])
    with pytest.raises(ModelError, match="a download has the hash"), verified("own/tiny", None):
        (cache / ("2" * 64)).write_bytes(b"wrong")
    assert not list(cache.iterdir())


def test_old_blobs_are_not_hashed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / ("1" * 64)).write_bytes(b"checked long ago")
    written = (cache / ("1" * 64)).stat().st_ctime_ns
    monkeypatch.setattr(blobs.time, "time_ns", lambda: written + 10**10)
    with verified("own/tiny", None):
        pass


def test_hashing_much_is_announced(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blobs, "LOGGED_BYTES", 10)
    content = b"0123456789"
    with caplog.at_level("INFO", "foretell"), verified("own/tiny", None):
        (cache / hashlib.sha256(content).hexdigest()).write_bytes(content)
    assert caplog.messages == ["verifying the download of own/tiny (0.0 GB)"]
