"""Fleets in simulation: closed forms in a limit, and what must hold whatever happens."""

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
from tests.plan.worlds import placed

LONG = 10_000.0  # tokens, so that the first, which comes with the prompt, is no matter


def steady(seats: int, seconds: float, shared: bool = False) -> ServiceTimes:
    """A text of `LONG` tokens takes so many seconds: each on its own, or all of them sharing one server."""
    steps = [StepEstimate(0, 0.0, seconds / LONG * (max(1, n) if shared else 1), 0.0, 1.0) for n in range(seats + 1)]
    return ServiceTimes(tuple(steps), prefill_seconds_per_token=0.0)


def queue(
    pace: ServiceTimes, rate: float, replicas: int = 1, seconds: float = 40_000.0, seed: int = 1, **more: object
) -> FleetRun:
    demand = replace(TrafficModel(rate, prompt=0.0, output=LONG, lengths="exponential"), **more)  # type: ignore[arg-type]
    return simulate(
        FleetSpec(replicas, pace), generate_requests(demand, seconds, seed), route_of("random", seed), seconds
    )


def erlang_c(servers: int, load: float) -> float:
    """How likely a caller has to wait."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_seat_is_a_queue_with_one_server(load: float) -> None:
    """M/M/1: times in the system are exponential with the mean 1 / (service rate - rate)."""
    run = queue(steady(1, 1.0), load)
    times = [visit.finished_at - visit.request.at for visit in run.requests]
    mean = 1 / (1 - load)
    assert fmean(times) == pytest.approx(mean, rel=0.06)
    assert quantile(sorted(times), 0.99) == pytest.approx(mean * math.log(100), rel=0.1)
    waits = [visit.admitted_at - visit.request.at for visit in run.requests]
    assert fmean(waits) == pytest.approx(load * mean, rel=0.1)
    assert run.utilisation == pytest.approx(load, rel=0.03) and run.running_per_replica == pytest.approx(load, rel=0.03)


def test_many_seats_of_equal_pace_are_many_servers() -> None:
    """M/M/c, by Erlang's formula."""
    run = queue(steady(4, 1.0), 3.0, seconds=20_000.0)
    waits = [visit.admitted_at - visit.request.at for visit in run.requests]
    chance = erlang_c(4, 3.0)
    assert sum(wait > 1e-9 for wait in waits) / len(waits) == pytest.approx(chance, rel=0.06)
    assert fmean(waits) == pytest.approx(chance / (4 - 3), rel=0.1)


def test_seats_that_share_one_server_are_served_in_turn() -> None:
    """M/M/1 with processor sharing: the same mean, and whoever wants twice as much stays twice as long."""
    load = 0.6
    run = queue(steady(200, 1.0, shared=True), load)
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
    target = placed("llama-3.1-8b")
    return service_times(target, find_drafter("eagle", target), 16, 1000, 900, 0.7, 8, "load", None)


BUSY = TrafficModel(rate=18.0, prompt=900.0, output=200.0, prefixes=40, prefix_tokens=600.0)


@pytest.mark.parametrize("routing", ROUTES)
@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_nothing_is_lost_and_nothing_comes_from_nowhere(real: ServiceTimes, routing: str, arrivals: str) -> None:
    demand = replace(BUSY, arrivals=arrivals)
    coming = generate_requests(demand, 120.0, 3)
    run = simulate(FleetSpec(3, real, max_prefixes=10, prefix_tokens=600.0), coming, route_of(routing, 3), 120.0)
    assert [visit.request for visit in run.requests] == coming, "everybody is served, once"
    for visit in run.requests:
        assert visit.request.at <= visit.admitted_at <= visit.first_token_at <= visit.finished_at <= run.end
    # Little's law holds to the last digit: time spent here is people times seconds.
    assert sum(tally.sequence_seconds for tally in run.integrals) == pytest.approx(
        sum(v.finished_at - v.request.at for v in run.requests)
    )
    assert sum(tally.running_seconds for tally in run.integrals) == pytest.approx(
        sum(v.finished_at - v.admitted_at for v in run.requests)
    )
    assert sum(tally.output_tokens for tally in run.integrals) == pytest.approx(
        sum(c.output - 1 for c in coming), rel=1e-6
    )
    assert sum(tally.prefill_tokens for tally in run.integrals) == pytest.approx(
        sum(v.prefill_tokens for v in run.requests), rel=1e-6
    )
    for number, tally in enumerate(run.integrals):
        assert 0 < tally.busy_seconds <= run.end and tally.running_seconds <= 16 * tally.busy_seconds * (1 + 1e-9)
        begun = [v.admitted_at for v in run.requests if v.replica == number]
        assert begun == sorted(begun), "who comes first is taken up first"


def test_no_text_is_faster_than_alone(real: ServiceTimes) -> None:
    run = simulate(FleetSpec(2, real), generate_requests(BUSY, 60.0, 5), route_of("least-loaded", 5), 60.0)
    assert min(run.tpots) >= (1 / real.steps[1].tokens_per_second) * (1 - 1e-6)


def test_routing_by_prefix_finds_more_in_caches(real: ServiceTimes) -> None:
    coming = generate_requests(BUSY, 200.0, 7)
    fleet = FleetSpec(4, real, max_prefixes=10, prefix_tokens=600.0)
    runs = {name: simulate(fleet, coming, route_of(name, 7), 200.0) for name in ROUTES}
    assert runs["prefix"].cached_share > 1.2 * runs["random"].cached_share > 0
    assert fmean(runs["prefix"].ttfts) < fmean(runs["random"].ttfts)
    assert quantile(runs["least-loaded"].ttfts, 0.99) < quantile(runs["random"].ttfts, 0.99)  # type: ignore[operator]
    nothing = simulate(FleetSpec(4, real), coming, route_of("prefix", 7), 200.0)
    assert nothing.cached_share == 0


def test_guessing_by_load_is_never_slower_than_always_or_never() -> None:
    target = placed("llama-3.1-8b")
    guesser = find_drafter("llama-3.2-1b", target)
    paces = {
        mode: service_times(target, guesser, 256, 4096, 4000, 0.35, 8, mode, None)  # type: ignore[arg-type]
        for mode in ("on", "off", "load")
    }
    for texts in range(1, 257):
        rates = {mode: pace.decode_rate(texts, reading=False) for mode, pace in paces.items()}
        assert rates["load"] >= max(rates["on"], rates["off"]) * (1 - 1e-12)
    assert paces["on"].decode_rate(1, False) > paces["off"].decode_rate(1, False)
    assert paces["on"].decode_rate(256, False) < paces["off"].decode_rate(256, False), "or this would test nothing"


def test_a_prompt_slows_those_who_are_written_for(real: ServiceTimes) -> None:
    assert real.decode_rate(8, reading=True) < real.decode_rate(8, reading=False)
    assert real.prefill_rate(8) < real.prefill_rate(0)


def test_a_seed_decides_everything(real: ServiceTimes) -> None:
    one, same, other = (generate_requests(BUSY, 30.0, seed) for seed in (1, 1, 2))
    assert one == same != other
    runs = [simulate(FleetSpec(2, real), one, route_of("random", 1), 30.0) for _ in range(2)]
    assert runs[0].ttfts == runs[1].ttfts


def test_demand_has_the_means_that_were_asked_for() -> None:
    for arrivals in ("poisson", "bursty"):
        coming = generate_requests(replace(BUSY, arrivals=arrivals), 1500.0, 11)  # type: ignore[arg-type]
        assert len(coming) / 1500 == pytest.approx(BUSY.rate, rel=0.08)
        assert fmean(call.prompt for call in coming) == pytest.approx(900, rel=0.05)
        assert fmean(call.output for call in coming) == pytest.approx(200, rel=0.05)
    counts = {name: _counts(replace(BUSY, arrivals=name)) for name in ("poisson", "bursty")}  # type: ignore[arg-type]
    assert counts["bursty"] > 2 * counts["poisson"], "bursts come in crowds"
    popular = [call.prefix for call in generate_requests(BUSY, 3000.0, 11)]
    assert popular.count(0) > 5 * popular.count(39) > 0


def _counts(demand: TrafficModel) -> float:
    """The variance of calls a second over their mean, which is 1 for a Poisson process."""
    seconds = [0] * 1000
    for call in generate_requests(demand, 1000.0, 13):
        seconds[int(call.at)] += 1
    mean = fmean(seconds)
    return fmean((count - mean) ** 2 for count in seconds) / mean


def test_the_smallest_fleet_that_does(real: ServiceTimes) -> None:
    demand = replace(BUSY, rate=60.0)
    trial = FleetTrial(
        FleetSpec(1, real), generate_requests(demand, 60.0, 1), "least-loaded", 60.0, 1, FleetSlo(0.5, 0.02), 3.0
    )
    found = trial.smallest()
    assert found.slo.met_by(found.run)
    assert found.fleet.replicas > 1 and not trial.slo.met_by(trial.simulate(found.fleet.replicas - 1).run)
    told = found.as_json()
    assert told["dollars_per_hour"] == 3.0 * found.fleet.replicas
    assert told["dollars_per_million_tokens"] == pytest.approx(
        told["dollars_per_hour"] / 3600 / told["tokens_per_second"] * 1e6
    )


def test_a_straggler_does_not_change_what_is_written_in_a_second() -> None:
    """One text that takes as long again as all others together, at the pace of one."""
    pace, seconds = steady(4, 1.0), 1000.0
    usual = generate_requests(TrafficModel(rate=2.0, prompt=1.0, output=LONG, lengths="exponential"), seconds, 2)
    runs = [
        simulate(FleetSpec(1, pace), some, route_of("random", 2), seconds)
        for some in (usual, [*usual, replace(usual[-1], at=seconds, number=len(usual), output=1e3 * LONG)])
    ]
    assert runs[1].end > 1.9 * runs[0].end
    for name in ("tokens_per_second", "utilisation", "texts_served", "texts_at_once"):
        assert getattr(runs[1], name) == pytest.approx(getattr(runs[0], name), rel=1e-3), name
    late = [call.output for call in usual if call.at >= 0.1 * seconds]
    assert runs[0].tokens_per_second == pytest.approx(sum(late) / (0.9 * seconds), rel=0.03)


def test_a_fleet_that_is_too_small_does_not_keep_up(real: ServiceTimes) -> None:
    demand = replace(BUSY, rate=100.0)
    run = simulate(FleetSpec(1, real), generate_requests(demand, 60.0, 1), route_of("random", 1), 60.0)
    assert not run.keeps_up and run.utilisation > 0.95
