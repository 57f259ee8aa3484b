"""The gateway over replicas that hang, die, fail or are slow, and callers without a key that flood it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from foretell.cluster import gateway as ingress
from foretell.cluster import prefix_affinity as marks
from foretell.cluster.gateway import HEALTH_GRACE, TIMEOUT_GRACE, Ingress
from foretell.cluster.replicas import CALL_ALL_TIMEOUT
from foretell.server.config import ServerConfig
from tests.attack import stub_replicas as stubs
from tests.attack.stub_replicas import Behaviour, Caller, StubReplicas, healthy, hung
from tests.virtual_time import now, run

KEY = "secret"
MIB = 1 << 20
TIMEOUT = 600.0


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes a gateway as Ray Serve would, over stub replicas."""

    def make(replicas: StubReplicas, **config: Any) -> Ingress:
        monkeypatch.setattr(ingress, "RayReplicas", lambda handle: replicas)
        settings = {"api_key": (KEY,), "request_timeout": TIMEOUT, "max_held_bytes": 8 * MIB, **config}
        return Ingress(None, 3, ServerConfig(**settings))

    return make


def ask(made: Ingress, **request: Any) -> tuple[Caller, float]:
    """Send one request; return its caller and the seconds it took."""

    async def go() -> tuple[Caller, float]:
        return await Caller(**{"key": KEY, **request}).call(made.wrapped_app), now()

    return run(go())


def get(made: Ingress, path: str) -> tuple[Caller, float]:
    return ask(made, path=path, method="GET", key="", body=b"")


def metric(made: Ingress, name: str) -> float:
    page, _ = get(made, "/metrics")
    return next(float(line.split()[-1]) for line in page.reply.decode().splitlines() if line.startswith(name))


@pytest.mark.parametrize("path", ["/health", "/metrics", "/metrics/replicas"])
def test_scrapers_and_probes_need_no_key(gateway: Any, path: str) -> None:
    assert get(gateway(StubReplicas(a=healthy)), path)[0].status == 200


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_flood_of_bodies_without_a_key_takes_no_memory(gateway: Any, key: str) -> None:
    replicas = StubReplicas(a=healthy)
    made = gateway(replicas)

    async def go() -> None:
        flood = [Caller(key=key, body=b"x" * MIB, stalls=True) for _ in range(64)]
        await asyncio.gather(*(caller.call(made.wrapped_app) for caller in flood))
        assert {caller.status for caller in flood} == {401} and not any(caller.reads for caller in flood)
        assert not replicas.asked, "nothing went to a replica"
        body = b'{"prompt": "' + b"x" * 2 * MIB + b'"}'
        assert (await Caller(key=KEY, body=body).call(made.wrapped_app)).status == 200

    run(go())
    assert metric(made, 'foretell:gateway_failures_total{code="invalid_api_key"}') == 64


def test_stalled_bodies_with_a_key_are_ended_and_give_their_memory_back(gateway: Any) -> None:
    made = gateway(StubReplicas(a=healthy))

    async def go() -> None:
        stalled = [Caller(key=KEY, body=b"x" * 3 * MIB, stalls=True) for _ in range(8)]
        await asyncio.gather(*(caller.call(made.wrapped_app) for caller in stalled))
        assert {caller.status for caller in stalled} == {408, 429}
        body = b'{"prompt": "' + b"x" * 3 * MIB + b'"}'
        assert (await Caller(key=KEY, body=body).call(made.wrapped_app)).status == 200

    run(go())


def test_browsers_get_cors_headers_from_the_gateway(gateway: Any) -> None:
    made = gateway(StubReplicas(a=healthy), cors_origin=("https://page.example",))
    origin = (b"origin", b"https://page.example")
    preflight, _ = ask(made, method="OPTIONS", key="", headers=[origin, (b"access-control-request-method", b"POST")])
    assert (preflight.status, preflight.header["access-control-allow-origin"]) == (200, "https://page.example")
    refused, _ = ask(made, key="", headers=[origin])
    assert (refused.status, refused.header["access-control-allow-origin"]) == (401, "https://page.example")
    answered, _ = ask(made, headers=[origin])
    assert (answered.status, answered.header["access-control-allow-origin"]) == (200, "https://page.example")


def test_another_host_name_is_refused_before_the_body_is_read(gateway: Any) -> None:
    made = gateway(StubReplicas(a=healthy), api_key=())
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "http_version": "1.1"}
    caller = Caller(body=b"x" * MIB, stalls=True)
    run(made.wrapped_app({**scope, "headers": [(b"host", b"evil.example")]}, caller.receive, caller.send))
    assert (caller.status, caller.reads) == (403, 0)


SICK: dict[str, Behaviour] = {
    "hung": hung,
    "dying": stubs.dying,
    "erroring": stubs.erroring,
    "hung midway": stubs.hung_midway,
    "lost midway": stubs.lost_midway,
    "unhealthy": stubs.slow(0.0, 503),
    "slow": stubs.slow(100.0),
}


@pytest.mark.parametrize("sick", SICK)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_sick_replica_does_not_hide_the_others(gateway: Any, sick: str, position: int) -> None:
    behaviours = [healthy, healthy]
    behaviours.insert(position, SICK[sick])
    made = gateway(StubReplicas(**dict(zip("abc", behaviours, strict=True))))
    others = [name for i, name in enumerate("abc") if i != position]
    for path in ("/health", "/ready"):
        found, seconds = get(made, path)
        assert found.status == 200 and seconds <= HEALTH_GRACE, "a liveness probe may allow a second only"
        each = found.json()["replicas"]
        assert all(each[name]["status"] == "ok" for name in others)
        if sick not in ("dying", "lost midway", "unhealthy"):
            assert each["abc"[position]]["status"] == "unavailable" and each["abc"[position]]["reason"]
    found, seconds = get(made, "/metrics")
    assert (found.status, metric(made, "foretell:n_total")) == (200, 2) and seconds <= CALL_ALL_TIMEOUT
    found, seconds = ask(made, path="/server_info", method="GET", body=b"")
    assert (found.status, found.json()["replicas"]) == (200, others) and seconds <= CALL_ALL_TIMEOUT


def test_where_all_hang_health_reports_why(gateway: Any) -> None:
    found, seconds = get(gateway(StubReplicas(a=hung, b=hung)), "/health")
    assert (found.status, seconds) == (503, CALL_ALL_TIMEOUT)
    assert found.json()["reason"] == "the replica did not answer in time" and len(found.json()["replicas"]) == 2
    found, _ = get(gateway(StubReplicas()), "/health")
    assert (found.status, found.json()["reason"]) == (503, "no replica runs")


def test_a_replica_reports_the_timeout_of_its_request_itself(gateway: Any) -> None:
    """Its own 504 arrives a little after the request timeout, and before the gateway gives up."""
    made = gateway(StubReplicas(a=stubs.slow(TIMEOUT + TIMEOUT_GRACE / 2, 504)))
    found, seconds = ask(made)
    assert (found.status, seconds) == (504, TIMEOUT + TIMEOUT_GRACE / 2) and found.header["x-foretell-replica"] == "a"


def test_a_request_that_takes_too_long_is_not_sent_again(gateway: Any) -> None:
    replicas = StubReplicas(a=hung, b=healthy)
    found, seconds = ask(gateway(replicas))
    assert (found.status, found.json()["error"]["code"], seconds) == (504, "timeout", TIMEOUT + TIMEOUT_GRACE)
    assert "retry-after" not in found.header, "a client would repeat the whole work"
    assert len(replicas.asked) == 1


def test_without_any_replica_the_request_may_come_again(gateway: Any) -> None:
    found, _ = ask(gateway(StubReplicas()))
    assert (found.status, found.json()["error"]["code"], found.header["retry-after"]) == (503, "unavailable", "1")


def test_a_stream_whose_replica_hangs_midway_ends(gateway: Any) -> None:
    made = gateway(StubReplicas(a=stubs.hung_midway))
    found, seconds = ask(made)
    first, error, done, rest = found.reply.split(b"\n\n")
    assert (first, done, rest) == (b"data: 1", b"data: [DONE]", b"")
    assert json.loads(error[6:])["error"]["code"] == "timeout" and seconds == TIMEOUT + TIMEOUT_GRACE
    assert found.complete and metric(made, "foretell:requests_cut_total") == 1


def test_a_replica_that_fails_costs_its_request_alone(gateway: Any) -> None:
    replicas = StubReplicas(a=stubs.erroring, b=healthy)
    made = gateway(replicas)
    assert ask(made)[0].status == 500 and len(replicas.asked) == 1
    assert get(made, "/health")[0].status == 200
    assert metric(made, 'foretell:gateway_failures_total{code="internal_error"}') == 1


def nested(depth: int) -> Any:
    found: Any = [1]
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("depth", [10, 5_000, 100_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_deeply_nested_bodies_are_left_to_the_replica(gateway: Any, path: str, depth: int) -> None:
    field = b"messages" if "chat" in path else b"prompt"
    body = b'{"%s": %s}' % (field, b"[" * depth + b"]" * depth)
    assert ask(gateway(StubReplicas(a=healthy)), path=path, body=body)[0].status == 200


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_depth_that_the_parser_allows_is_no_error(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """The parser of Python 3.12 and later accepts more levels than the interpreter has stack frames."""
    deep = nested(50_000)
    monkeypatch.setattr(marks.json, "loads", lambda body: {field: deep})
    assert marks.prefix_hashes("/v1/completions", "", b"") == ()
    while isinstance(deep, list) and deep:
        deep = deep[0]  # or freeing it recurses


BEHAVIOURS: list[Behaviour] = [
    healthy, hung, stubs.dying, stubs.erroring, stubs.full, stubs.streaming, stubs.hung_midway, stubs.lost_midway,
    stubs.slow(1.0), stubs.slow(TIMEOUT), stubs.slow(TIMEOUT, 504), stubs.slow(0.5, 503),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_under_any_faults_every_request_gets_one_response(gateway: Any, seed: int) -> None:
    dice = random.Random(seed)
    replicas = StubReplicas(**{name: dice.choice(BEHAVIOURS) for name in "abc"})
    made = gateway(replicas)

    async def faults() -> None:
        for _ in range(20):
            await asyncio.sleep(dice.expovariate(1 / 60))
            replicas.behaviours[dice.choice("abc")] = dice.choice(BEHAVIOURS)

    async def one() -> Caller:
        await asyncio.sleep(dice.uniform(0, 1200))
        path, method = dice.choice([("/v1/completions", "POST")] * 4 + [("/health", "GET"), ("/metrics", "GET")])
        leaves = dice.uniform(0, 700) if dice.random() < 0.2 else None
        caller = Caller(path, method, dice.choice([KEY, KEY, KEY, ""]), b"{}" if method == "POST" else b"")
        caller.stalls, caller.leaves = method == "POST" and dice.random() < 0.1, leaves
        return await caller.call(made.wrapped_app)

    async def go() -> list[Caller]:
        callers = await asyncio.gather(*(one() for _ in range(200)), faults())
        assert now() < 1200 + 3 * (TIMEOUT + TIMEOUT_GRACE), "nothing waits without a limit"
        return [caller for caller in callers if caller is not None]

    for caller in run(go()):
        assert caller.status in (None, 200, 401, 408, 429, 500, 502, 503, 504)
        assert caller.complete or caller.leaves is not None, (caller.path, caller.status)
    assert made.gateway.ongoing == 0
    replicas.behaviours = {"a": healthy}
    assert ask(made, body=b'{"prompt": "' + b"x" * 3 * MIB + b'"}')[0].status == 200, "no body is held any more"
