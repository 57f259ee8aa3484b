"""Two replicas of the tiny model on a Ray of their own: routing, metrics, a kill, an update."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import needs_ray
from tests.cluster.load import Load, environment, family, rank_pids, replica_pids, wait_for
from tests.server.process import ServerProcess

pytestmark = needs_ray
LONG = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 3
INTRUDER = """
import sys, grpc
call = grpc.insecure_channel("127.0.0.1:" + sys.argv[1]).unary_unary("/ray.serve.ASGIService/HandleRequest")
try:
    print(call(b"", timeout=9))
except grpc.RpcError as error:
    print(error.code().name)
"""
RAY = re.compile(r"Ray at (\S+);")


def ask(server: ServerProcess, prompt: str, **more: Any) -> httpx.Response:
    reply = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **more})
    assert reply.status_code == 200, reply.text
    return reply


def by(reply: httpx.Response) -> str:
    return str(reply.headers["x-foretell-replica"])


def living(server: ServerProcess) -> list[str]:
    return sorted(server.http.get("/health").json()["replicas"])


def test_both_answer_and_a_conversation_stays(server: ServerProcess) -> None:
    first = {who: by(ask(server, who + LONG)) for who in ("Anna: ", "Berta: ", "Carla: ", "Dora: ")}
    assert len(set(first.values())) == 2
    for who, replica in first.items():

        def cached(prompt: str = who + LONG + "And then?", replica: str = replica) -> bool:
            again = ask(server, prompt)
            assert by(again) == replica
            return bool(again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 32)

        wait_for(cached)  # a replica that changes its drafter clears its prefix cache once


def test_metrics_of_both_together_and_each(server: ServerProcess) -> None:
    ask(server, LONG)
    merged = server.metrics()
    each = server.http.get("/metrics/replicas").text
    found = re.findall(r'foretell:prompt_tokens_total\{.*replica="(\w+)"\} (\S+)', each)
    assert [name for name, _ in found] == living(server)
    assert merged["foretell:prompt_tokens_total"] == sum(float(value) for _, value in found)
    assert merged["foretell:replicas"] == 2


def test_status_endpoints_cover_all_replicas(server: ServerProcess) -> None:
    info = server.http.get("/server_info").json()
    assert info["replicas"] == living(server)
    assert [state["replica"] for state in info["internal_states"]] == info["replicas"]
    assert all(part in server.greeting for part in ("2 replicas of 1 core", "routing by prefix", "logs: "))


def test_a_disconnected_client_frees_its_pages(server: ServerProcess) -> None:
    body = {"prompt": LONG, "max_tokens": 700, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        parts = reply.iter_bytes()  # kept: with it the connection would go
        next(parts)
        assert server.metrics()["foretell:num_requests_running"] == 1
    wait_for(lambda: server.metrics()["foretell:num_requests_running"] == 0, 10)
    assert server.metrics()["foretell:kv_cache_usage_perc"] == 0, "nor do its pages stay held"


def test_only_what_ray_serve_opens_itself_can_be_reached_from_elsewhere(server: ServerProcess) -> None:
    """Ray Serve opens one port per replica on all interfaces, which requires Ray's token."""
    ours = family(server.process.pid)
    answered = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout.splitlines()
    lines = [line for line in answered if ours & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}]
    assert lines, "ss should say whose ports are open"
    far = [line for line in lines if not line.split()[3].startswith(("127.0.0.1:", "[::ffff:127.0.0.1]:"))]
    assert all("ray::ServeRepli" in line for line in far) and len(far) == 3, "two replicas and the front"
    for line in far:
        words = [sys.executable, "-c", INTRUDER, line.split()[3].rsplit(":", 1)[1]]
        assert "UNAUTHENTICATED" in subprocess.run(words, capture_output=True, text=True, timeout=30).stdout


def test_a_stopped_replica_does_not_hide_the_other(server: ServerProcess) -> None:
    both, stopped = living(server), replica_pids(server.process.pid)[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        for path in ("/health", "/ready"):
            reply = server.http.get(path)
            found = reply.json()["replicas"]
            assert reply.status_code == 200 and sorted(found) == both
            assert sorted(each["status"] for each in found.values()) == ["ok", "unavailable"]
        info = server.http.get("/server_info").json()
        assert info["replicas"] == [name for name in both if found[name]["status"] == "ok"]
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: all(each["status"] == "ok" for each in server.http.get("/health").json()["replicas"].values()))


def test_a_killed_replica_costs_no_request_that_had_not_begun(server: ServerProcess) -> None:
    before = living(server)
    pids = replica_pids(server.process.pid)
    assert len(pids) == len(before) == 2
    with Load(server.url) as load:
        wait_for(lambda: sum(load.outcomes.values()) >= 20)
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: len(now := living(server)) == 2 and now != before, 90)
        done = sum(load.outcomes.values())
        wait_for(lambda: sum(load.outcomes.values()) >= done + 10)
    assert not load.wrong
    assert load.outcomes["cut"] + load.outcomes["broken"] <= load.callers, "of those that streamed from it at most"
    assert load.outcomes["whole"] > 10 and load.outcomes["streamed"] > 10


@pytest.mark.slow
def test_an_update_costs_no_request(server: ServerProcess, folder: Path, tmp_path: Path) -> None:
    found = RAY.search(server.greeting)
    assert found is not None
    before, port = living(server), server.url.rsplit(":", 1)[1]
    app = tmp_path / "app.yaml"
    app.write_text(
        f"model: {folder}\naddress: {found[1]}\nport: {port}\nreplicas: 2\nserved_model_name: tiny\n"
        f"threads: 1\nhealth_check_period: 1\nmax_draft: 3\n"
    )
    with Load(server.url) as load:
        wait_for(lambda: sum(load.outcomes.values()) >= 10)
        words = [sys.executable, "-m", "foretell", "deploy", str(app)]
        done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=150)
        assert done.returncode == 0, done.stderr
        answered = sum(load.outcomes.values())
        wait_for(lambda: sum(load.outcomes.values()) >= answered + 10)
    assert not load.wrong and set(load.outcomes) == {"whole", "streamed"}, load.wrong
    assert not set(before) & set(living(server)) and len(living(server)) == 2
    assert server.http.get("/server_info").json()["max_draft"] == 3


def test_an_unknown_application_cannot_be_removed(server: ServerProcess, tmp_path: Path) -> None:
    found = RAY.search(server.greeting)
    assert found is not None
    (tmp_path / "app.yaml").write_text(f"address: {found[1]}\napp_name: other\n")
    words = [sys.executable, "-m", "foretell", "deploy", str(tmp_path / "app.yaml"), "--remove"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2 and "app_name: other is not deployed on this Ray; deployed: foretell" in done.stderr


def test_more_replicas_than_cores(server: ServerProcess, folder: Path) -> None:
    found = RAY.search(server.greeting)
    assert found is not None
    words = [sys.executable, "-m", "foretell", "serve", str(folder), "--replicas", "4096", "--address", found[1]]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=120)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "4096 replicas of 1 core need 4096" in last and last.startswith("foretell: ")


@pytest.mark.slow
def test_it_stops_on_a_signal(folder: Path) -> None:
    with ServerProcess(folder, "--replicas", "1") as process:
        began = time.monotonic()
        assert process.http.get("/ready").status_code == 200
        assert process.stop() == 0
        assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_replica_that_loses_a_rank_is_replaced(folder: Path) -> None:
    with ServerProcess(
        folder, "--replicas", "2", "--tensor-parallel-size", "2", "--health-check-period", "1"
    ) as server:
        before, ranks = living(server), rank_pids(server.process.pid)
        assert len(before) == len(ranks) == 2
        with Load(server.url) as load:
            wait_for(lambda: sum(load.outcomes.values()) >= 10)
            os.kill(ranks[0], signal.SIGKILL)
            wait_for(lambda: len(now := living(server)) == 2 and now != before, 90)
        assert not load.wrong, "what it could not answer the other did"
        assert len(rank_pids(server.process.pid)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.slow
def test_replicas_come_and_go_with_the_load(folder: Path) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "metrics_interval_s": 0.5}
    scaling |= {"look_back_period_s": 2.0, "upscale_delay_s": 0.0, "downscale_delay_s": 3.0}
    with ServerProcess(folder, "--autoscaling", json.dumps(scaling), "--replica-cpus", "1") as server:
        assert len(living(server)) == 1 and "1 to 2 replicas" in server.greeting
        with Load(server.url, callers=6) as load:
            wait_for(lambda: len(living(server)) == 2, 60)
            time.sleep(2)
        wait_for(lambda: len(living(server)) == 1, 60)
        assert not load.wrong and set(load.outcomes) == {"whole", "streamed"}
