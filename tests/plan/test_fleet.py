"""Fleet simulation: queueing theory in limiting cases, and invariants."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest

from foretell.plan.drafter_cost import StepEstimate, find_drafter
from foretell.plan.fleet.arrivals import TrafficModel, generate_requests
from foretell.plan.fleet.service_time import ServiceTimes, service_times
from foretell.plan.fleet.simulate import ROUTES, FleetRun, FleetSpec, quantile, route_of, simulate
from foretell.plan.fleet.sizing import FleetSlo, FleetTrial
from tests.plan.deployments import deployed

LONG = 10_000.0  # tokens, so that the first one, which comes with the prefill, is negligible


def constant_service(max_num_seqs: int, seconds: float, shared: bool = False) -> ServiceTimes:
    """Return service times of `seconds` for `LONG` tokens, of each sequence alone or with one server shared."""
    steps = [
        StepEstimate(0, 0.0, seconds / LONG * (max(1, n) if shared else 1), 0.0, 1.0) for n in range(max_num_seqs + 1)
    ]
    return ServiceTimes(tuple(steps), prefill_seconds_per_token=0.0)


def queue(
    service: ServiceTimes, rate: float, replicas: int = 1, seconds: float = 40_000.0, seed: int = 1, **more: object
) -> FleetRun:
    traffic = replace(TrafficModel(rate, prompt=0.0, output=LONG, lengths="exponential"), **more)  # type: ignore[arg-type]
    return simulate(
        FleetSpec(replicas, service), generate_requests(traffic, seconds, seed), route_of("random", seed), seconds
    )


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a request has to wait (Erlang C)."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_slot_is_an_m_m_1_queue(load: float) -> None:
    """Times in the system are exponential with mean 1 / (service rate - arrival rate)."""
    run = queue(constant_service(1, 1.0), load)
    times = [served.finished_at - served.request.at for served in run.requests]
    mean = 1 / (1 - load)
    assert fmean(times) == pytest.approx(mean, rel=0.06)
    assert quantile(sorted(times), 0.99) == pytest.approx(mean * math.log(100), rel=0.1)
    waits = [served.admitted_at - served.request.at for served in run.requests]
    assert fmean(waits) == pytest.approx(load * mean, rel=0.1)
    assert run.utilisation == pytest.approx(load, rel=0.03) and run.running_per_replica == pytest.approx(load, rel=0.03)


def test_independent_slots_are_an_m_m_c_queue() -> None:
    """Waiting times follow the Erlang C formula."""
    run = queue(constant_service(4, 1.0), 3.0, seconds=20_000.0)
    waits = [served.admitted_at - served.request.at for served in run.requests]
    chance = erlang_c(4, 3.0)
    assert sum(wait > 1e-9 for wait in waits) / len(waits) == pytest.approx(chance, rel=0.06)
    assert fmean(waits) == pytest.approx(chance / (4 - 3), rel=0.1)


def test_slots_that_share_one_server_are_processor_sharing() -> None:
    """M/M/1 with processor sharing: the same mean, and time in the system is proportional to length."""
    load = 0.6
    run = queue(constant_service(200, 1.0, shared=True), load)
    assert fmean(v.finished_at - v.request.at for v in run.requests) == pytest.approx(1 / (1 - load), rel=0.06)
    short = [v for v in run.requests if 0.4 * LONG < v.request.output < 0.6 * LONG]
    long = [v for v in run.requests if 1.8 * LONG < v.request.output < 2.2 * LONG]
    stays = [
        fmean(v.finished_at - v.request.at for v in some) / fmean(v.request.output for v in some)
        for some in (short, long)
    ]
    assert stays[0] == pytest.approx(stays[1], rel=0.1)


@pytest.fixture(scope="module")
def real() -> ServiceTimes:
    target = deployed("llama-3.1-8b")
    return service_times(target, find_drafter("eagle", target), 16, 1000, 900, 0.7, 8, "load", None)


BUSY = TrafficModel(rate=18.0, prompt=900.0, output=200.0, prefixes=40, prefix_tokens=600.0)


@pytest.mark.parametrize("routing", ROUTES)
@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_requests_and_tokens_are_conserved(real: ServiceTimes, routing: str, arrivals: str) -> None:
    traffic = replace(BUSY, arrivals=arrivals)
    requests = generate_requests(traffic, 120.0, 3)
    run = simulate(FleetSpec(3, real, max_prefixes=10, prefix_tokens=600.0), requests, route_of(routing, 3), 120.0)
    assert [served.request for served in run.requests] == requests, "every request is served once"
    for served in run.requests:
        assert served.request.at <= served.admitted_at <= served.first_token_at <= served.finished_at <= run.end
    # Little's law holds exactly: requests times seconds is the sum of their times in the system.
    assert sum(integrals.sequence_seconds for integrals in run.integrals) == pytest.approx(
        sum(v.finished_at - v.request.at for v in run.requests)
    )
    assert sum(integrals.running_seconds for integrals in run.integrals) == pytest.approx(
        sum(v.finished_at - v.admitted_at for v in run.requests)
    )
    assert sum(integrals.output_tokens for integrals in run.integrals) == pytest.approx(
        sum(c.output - 1 for c in requests), rel=1e-6
    )
    assert sum(integrals.prefill_tokens for integrals in run.integrals) == pytest.approx(
        sum(v.prefill_tokens for v in run.requests), rel=1e-6
    )
    for number, integrals in enumerate(run.integrals):
        assert 0 < integrals.busy_seconds <= run.end and integrals.running_seconds <= 16 * integrals.busy_seconds * (
            1 + 1e-9
        )
        begun = [v.admitted_at for v in run.requests if v.replica == number]
        assert begun == sorted(begun), "first come, first served"


def test_no_request_is_faster_than_alone(real: ServiceTimes) -> None:
    run = simulate(FleetSpec(2, real), generate_requests(BUSY, 60.0, 5), route_of("least-loaded", 5), 60.0)
    assert min(run.tpots) >= (1 / real.steps[1].tokens_per_second) * (1 - 1e-6)


def test_prefix_routing_has_more_cache_hits(real: ServiceTimes) -> None:
    requests = generate_requests(BUSY, 200.0, 7)
    fleet = FleetSpec(4, real, max_prefixes=10, prefix_tokens=600.0)
    runs = {name: simulate(fleet, requests, route_of(name, 7), 200.0) for name in ROUTES}
    assert runs["prefix"].cached_share > 1.2 * runs["random"].cached_share > 0
    assert fmean(runs["prefix"].ttfts) < fmean(runs["random"].ttfts)
    assert quantile(runs["least-loaded"].ttfts, 0.99) < quantile(runs["random"].ttfts, 0.99)  # type: ignore[operator]
    uncached = simulate(FleetSpec(4, real), requests, route_of("prefix", 7), 200.0)
    assert uncached.cached_share == 0


def test_speculation_by_load_is_never_slower_than_on_or_off() -> None:
    target = deployed("llama-3.1-8b")
    drafter = find_drafter("llama-3.2-1b", target)
    services = {
        mode: service_times(target, drafter, 256, 4096, 4000, 0.35, 8, mode, None)  # type: ignore[arg-type]
        for mode in ("on", "off", "load")
    }
    for batch in range(1, 257):
        rates = {mode: service.decode_rate(batch, is_prefilling=False) for mode, service in services.items()}
        assert rates["load"] >= max(rates["on"], rates["off"]) * (1 - 1e-12)
    assert services["on"].decode_rate(1, False) > services["off"].decode_rate(1, False)
    assert services["on"].decode_rate(256, False) < services["off"].decode_rate(256, False), (
        "otherwise the test is void"
    )


def test_prefill_slows_decode(real: ServiceTimes) -> None:
    assert real.decode_rate(8, is_prefilling=True) < real.decode_rate(8, is_prefilling=False)
    assert real.prefill_rate(8) < real.prefill_rate(0)


def test_a_seed_determines_the_run(real: ServiceTimes) -> None:
    one, same, other = (generate_requests(BUSY, 30.0, seed) for seed in (1, 1, 2))
    assert one == same != other
    runs = [simulate(FleetSpec(2, real), one, route_of("random", 1), 30.0) for _ in range(2)]
    assert runs[0].ttfts == runs[1].ttfts


def test_generated_requests_have_the_given_means() -> None:
    for arrivals in ("poisson", "bursty"):
        requests = generate_requests(replace(BUSY, arrivals=arrivals), 1500.0, 11)  # type: ignore[arg-type]
        assert len(requests) / 1500 == pytest.approx(BUSY.rate, rel=0.08)
        assert fmean(request.prompt for request in requests) == pytest.approx(900, rel=0.05)
        assert fmean(request.output for request in requests) == pytest.approx(200, rel=0.05)
    counts = {name: _counts(replace(BUSY, arrivals=name)) for name in ("poisson", "bursty")}  # type: ignore[arg-type]
    assert counts["bursty"] > 2 * counts["poisson"], "bursts are overdispersed"
    popular = [request.prefix for request in generate_requests(BUSY, 3000.0, 11)]
    assert popular.count(0) > 5 * popular.count(39) > 0


def _counts(traffic: TrafficModel) -> float:
    """Return the variance over the mean of arrivals per second, which is 1 for a Poisson process."""
    seconds = [0] * 1000
    for request in generate_requests(traffic, 1000.0, 13):
        seconds[int(request.at)] += 1
    mean = fmean(seconds)
    return fmean((count - mean) ** 2 for count in seconds) / mean


def test_the_smallest_fleet_meets_the_slos(real: ServiceTimes) -> None:
    traffic = replace(BUSY, rate=60.0)
    trial = FleetTrial(
        FleetSpec(1, real), generate_requests(traffic, 60.0, 1), "least-loaded", 60.0, 1, FleetSlo(0.5, 0.02), 3.0
    )
    found = trial.smallest()
    assert found.slo.met_by(found.run)
    assert found.fleet.replicas > 1 and not trial.slo.met_by(trial.simulate(found.fleet.replicas - 1).run)
    figures = found.as_json()
    assert figures["dollars_per_hour"] == 3.0 * found.fleet.replicas
    assert figures["dollars_per_million_tokens"] == pytest.approx(
        figures["dollars_per_hour"] / 3600 / figures["tokens_per_second"] * 1e6
    )


def test_a_long_last_request_does_not_change_the_throughput() -> None:
    """One request that takes as long as all others together."""
    service, seconds = constant_service(4, 1.0), 1000.0
    usual = generate_requests(TrafficModel(rate=2.0, prompt=1.0, output=LONG, lengths="exponential"), seconds, 2)
    runs = [
        simulate(FleetSpec(1, service), some, route_of("random", 2), seconds)
        for some in (usual, [*usual, replace(usual[-1], at=seconds, number=len(usual), output=1e3 * LONG)])
    ]
    assert runs[1].end > 1.9 * runs[0].end
    for name in ("tokens_per_second", "utilisation", "running_per_replica", "sequences_per_replica"):
        assert getattr(runs[1], name) == pytest.approx(getattr(runs[0], name), rel=1e-3), name
    late = [request.output for request in usual if request.at >= 0.1 * seconds]
    assert runs[0].tokens_per_second == pytest.approx(sum(late) / (0.9 * seconds), rel=0.03)


def test_a_fleet_that_is_too_small_is_overloaded(real: ServiceTimes) -> None:
    traffic = replace(BUSY, rate=100.0)
    run = simulate(FleetSpec(1, real), generate_requests(traffic, 60.0, 1), route_of("random", 1), 60.0)
    assert not run.keeps_up and run.utilisation > 0.95
