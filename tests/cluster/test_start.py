"""Ray start-up code without Ray: the error if it is missing, finding a running one, failure reasons."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import sys
import threading
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.main import main
from foretell.cluster import ray_start
from foretell.cluster import run as cluster_run
from foretell.cluster.config import ClusterConfig
from foretell.cluster.deploy import failure_reason
from foretell.cluster.ray_start import RayConnection, is_loopback_only, running_here
from foretell.cluster.replica import ReplicaServer
from foretell.cluster.replica_spec import ReplicaResources, ReplicaSpec
from foretell.cluster.replicas import ReplicaCall, RunningReplicas
from foretell.cluster.run import RunningApp, Signals, serve_replicas, startup_line
from foretell.config import EngineConfig, SpeculationConfig
from foretell.errors import RequestError
from foretell.server.config import ServerConfig
from foretell.server.registry import RunningServer, running_servers

ROOT = Path(__file__).parents[2]
SERVED = ReplicaSpec(ServerConfig(served_model_name=("tiny",)), EngineConfig(), SpeculationConfig())


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("words", [["serve", "--replicas", "2"], ["deploy", "app.yaml"]])
def test_without_ray_the_error_says_what_to_install(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("app.yaml").write_text("replicas: 2\n")
    assert main(words) == 1
    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cluster"]
    assert capsys.readouterr().err.strip().endswith(f"not installed: pip install '{extra}'")


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("replcas: 2", "did you mean 'replicas'?"),
        ("autoscaling: {max_replica: 2}", "did you mean 'max_replicas'?"),
        ("replicas: many", "replicas"),
        ("replicas: 2\nautoscaling: {max_replicas: 3}", "give one"),
        ("- replicas", "must have lines such as"),
        ("routing: nearest", "'nearest' is not known; known: "),
        ("", "is empty; give at least a model"),
        ("# model: smollm2-135m\nmodel:\n", "is empty"),
    ],
)
def test_invalid_config_files(text: str, report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(text)
    assert main(["deploy", str(file)]) == 2
    output = capsys.readouterr().err
    assert report in output and output.count("\n") == 1


def test_a_running_ray_is_found_by_its_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert running_here() is None
    (tmp_path / "ray").mkdir()
    with socket.socket() as ray:
        ray.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{ray.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address + "\n")
        assert running_here() is None, "it has gone and left its note"
        ray.listen()
        assert running_here() == address
        assert is_loopback_only(address) and not is_loopback_only("10.1.2.3:6379")
        monkeypatch.setattr(ray_start, "_external_address", lambda: "127.0.0.1")
        assert not is_loopback_only(address), "others can reach it"


def note_of(folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the file in which Ray stores the address of the last started cluster."""
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    note = folder / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    note.write_text(address)
    note.chmod(0o644)
    return note


def test_an_address_noted_by_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The temporary folder is shared: `deploy` would send the settings, API keys included, to that address."""
    monkeypatch.setattr(ray_start, "check_installed", lambda: None)
    monkeypatch.setattr(ray_start, "_join", lambda address: pytest.fail("it was joined"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        note_of(tmp_path, f"127.0.0.1:{other.getsockname()[1]}", monkeypatch)
        user = os.getuid()
        assert running_here() is not None
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        for address in (None, "auto"):
            with pytest.raises(RequestError, match="not trusted.*name the Ray by HOST:PORT, or set RAY_TMPDIR"):
                ray_start.connect(address, dashboard=False, stay=True)


def test_a_note_that_others_could_change_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = note_of(tmp_path, "127.0.0.1:1", monkeypatch)
    note.chmod(0o666)
    with pytest.raises(RequestError, match="not trusted"):
        running_here()
    note.rename(tmp_path / "elsewhere")
    note.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="not trusted"):
        running_here()
    note.unlink()
    os.mkfifo(note)  # a plain read would block
    with pytest.raises(RequestError, match="not trusted"):
        running_here()
    note.unlink()
    note.mkdir()
    with pytest.raises(RequestError, match="not trusted"):
        running_here()


def test_auto_needs_a_ray_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_start, "check_installed", lambda: None)
    before = dict(os.environ)
    with pytest.raises(RequestError, match="no Ray runs on this machine"):
        ray_start.connect("auto", dashboard=False, stay=True)
    assert dict(os.environ) == before


def test_nothing_is_started_to_take_nothing_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("foretell.cluster.run.check_installed", lambda: None)
    monkeypatch.setattr("foretell.cluster.run.connect", lambda *given, **more: pytest.fail("it was connected to"))
    (tmp_path / "app.yaml").write_text("replicas: 2\n")
    assert main(["deploy", str(tmp_path / "app.yaml"), "--remove"]) == 1
    assert "nothing to remove" in capsys.readouterr().err


def test_a_signal_aborts_a_start_and_later_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    waiting = Signals()
    with pytest.raises(KeyboardInterrupt):
        handlers[signal.SIGINT](signal.SIGINT, None)
    assert not waiting.first.is_set()
    threading.Timer(0.05, lambda: handlers[signal.SIGTERM](signal.SIGTERM, None)).start()
    waiting.wait()
    assert waiting.first.is_set() and not waiting.second.is_set()
    handlers[signal.SIGINT](signal.SIGINT, None)
    assert waiting.second.is_set()


def test_why_replicas_did_not_start() -> None:
    report = (
        "Deploying app failed.\nTraceback\n  File x\nforetell.errors.ModelError: there is no model x\nSee the logs.\n"
    )
    assert failure_reason(report) == "there is no model x"
    assert failure_reason("Traceback\nValueError: 3 is odd\nSee the logs.") == "ValueError: 3 is odd"
    assert failure_reason("it failed") == "it failed"


def test_the_greeting() -> None:
    ray = RayConnection("127.0.0.1:1234", {}, "/tmp/ray/logs")
    line = startup_line(ClusterConfig(replicas=2), SERVED, ReplicaResources(1, 0), 8000, ray)
    assert "http://127.0.0.1:8000 serves tiny; 2 replicas of 1 core, routing by prefix; Ray at 127.0.0.1:1234" in line
    scaled = ClusterConfig(autoscaling='{"max_replicas": 4}', routing="random")
    assert "1 to 4 replicas of 2 GPUs and 8 cores, routing by random" in startup_line(
        scaled, SERVED, ReplicaResources(8, 2), 1, ray
    )


def test_threads_are_the_cores_of_a_replica_unless_set() -> None:
    assert SERVED.with_threads(3).engine.threads == 3
    asked = ReplicaSpec(SERVED.server, EngineConfig(threads=2), SERVED.speculation)
    assert asked.with_threads(3).engine.threads == 2


class Sick:
    unhealthy_reason: str | None = None


def test_a_replica_is_as_well_as_its_engine() -> None:
    class Body:
        service = Sick()

    asyncio.run(ReplicaServer.check_health(Body()))  # type: ignore[arg-type]
    Body.service.unhealthy_reason = "a step has taken 200 seconds"
    with pytest.raises(RuntimeError, match="200 seconds"):
        asyncio.run(ReplicaServer.check_health(Body()))  # type: ignore[arg-type]


class RayRouter:
    """The parts of Ray's router class that ours uses."""

    def update_replicas(self, replicas: list[Any]) -> None: ...
    def on_send_request(self, replica_id: Any) -> None: ...


def test_the_router_counts_what_is_under_way_and_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("ray.serve.request_router")
    vars(fake).update(RequestRouter=RayRouter, PendingRequest=None, ReplicaID=None, RunningReplica=None)
    for name, module in {
        "ray": types.ModuleType("ray"),
        "ray.serve": types.ModuleType("s"),
        fake.__name__: fake,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "foretell.cluster.router", raising=False)
    from foretell.cluster.router import PrefixRouter

    monkeypatch.delitem(sys.modules, "foretell.cluster.router")
    ids = {name: types.SimpleNamespace(unique_id=name) for name in "ab"}
    replicas = [types.SimpleNamespace(replica_id=each) for each in ids.values()]
    monkeypatch.setattr(RunningReplicas, "names", ())
    router: Any = PrefixRouter()
    router.initialize_state(routing="prefix", slack=1)

    def order(**call: Any) -> list[str]:
        asked = types.SimpleNamespace(args=(ReplicaCall("POST", "/", **call),))
        return [rank[0].replica_id.unique_id for rank in asyncio.run(router.choose_replicas(replicas, asked))]

    router.on_send_request(ids["a"])
    assert order() == ["b", "a"]
    router.on_request_routed(
        types.SimpleNamespace(args=(ReplicaCall("POST", "/", prefix_hashes=(b"m",)),)), ids["a"], None
    )
    assert order(prefix_hashes=(b"m",)) == ["a", "b"], "within the slack"
    router.on_send_request(ids["a"])
    assert order(prefix_hashes=(b"m",)) == ["b", "a"], "beyond it"
    for _ in range(5):
        router.on_request_completed(ids["a"], "x")
    router.on_send_request(ids["a"])
    assert order() == ["b", "a"], "there was nothing under way, and not less"
    router.on_request_completed(ids["a"], "x")
    router.on_send_request(ids["b"])
    assert order() == ["a", "b"]
    assert order(avoid=("a",)) == ["b", "a"]
    assert order(target="b") == ["b"]
    assert sorted(order(target="gone")) == ["a", "b"], "Ray Serve must always get a candidate"
    assert RunningReplicas.names == ("a", "b")
    router.update_replicas(replicas[:1])
    assert RunningReplicas.names == ("a",)
    assert set(router._ongoing) == {"a"}
    assert asyncio.run(router.choose_replicas(replicas, None))


def test_a_server_of_replicas_is_listed_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    app = RunningApp(None, "http://127.0.0.1:8000", "foretell: http://127.0.0.1:8000 serves tiny")
    listed: list[RunningServer] = []

    class Waiting:
        def wait(self) -> None:
            listed.extend(running_servers())

    values = {"check_installed": None, "connect": None, "_start_app": app, "_drain": 0, "_disconnect": None}
    for name, value in values.items():
        monkeypatch.setattr(cluster_run, name, lambda *args, value=value, **options: value)
    monkeypatch.setattr(cluster_run, "Signals", Waiting)
    assert serve_replicas(ClusterConfig(replicas=2), SERVED, []) == 0
    assert [(each.url, each.model, each.drafters) for each in listed] == [(app.url, "tiny", ("auto",))]
    assert running_servers() == [] and app.line in capsys.readouterr().out
