"""Fleets in simulation: closed forms in a limit, and what must hold whatever happens."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest

from foretell.plan.drafter_cost import Round, find_guesser
from foretell.plan.fleet.arrivals import Demand, calls
from foretell.plan.fleet.service_time import Pace, pace_of
from foretell.plan.fleet.simulate import ROUTES, Fleet, Run, quantile, route_of, simulate
from foretell.plan.fleet.sizing import Goals, Trial
from tests.plan.worlds import placed

LONG = 10_000.0  # tokens, so that the first, which comes with the prompt, is no matter


def steady(seats: int, seconds: float, shared: bool = False) -> Pace:
    """A text of `LONG` tokens takes so many seconds: each on its own, or all of them sharing one server."""
    steps = [Round(0, 0.0, seconds / LONG * (max(1, n) if shared else 1), 0.0, 1.0) for n in range(seats + 1)]
    return Pace(tuple(steps), read=0.0)


def queue(pace: Pace, rate: float, replicas: int = 1, seconds: float = 40_000.0, seed: int = 1, **more: object) -> Run:
    demand = replace(Demand(rate, prompt=0.0, output=LONG, lengths="exponential"), **more)  # type: ignore[arg-type]
    return simulate(Fleet(replicas, pace), calls(demand, seconds, seed), route_of("random", seed), seconds)


def erlang_c(servers: int, load: float) -> float:
    """How likely a caller has to wait."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_seat_is_a_queue_with_one_server(load: float) -> None:
    """M/M/1: times in the system are exponential with the mean 1 / (service rate - rate)."""
    run = queue(steady(1, 1.0), load)
    times = [visit.done - visit.call.at for visit in run.visits]
    mean = 1 / (1 - load)
    assert fmean(times) == pytest.approx(mean, rel=0.06)
    assert quantile(sorted(times), 0.99) == pytest.approx(mean * math.log(100), rel=0.1)
    waits = [visit.begun - visit.call.at for visit in run.visits]
    assert fmean(waits) == pytest.approx(load * mean, rel=0.1)
    assert run.utilisation == pytest.approx(load, rel=0.03) and run.texts_served == pytest.approx(load, rel=0.03)


def test_many_seats_of_equal_pace_are_many_servers() -> None:
    """M/M/c, by Erlang's formula."""
    run = queue(steady(4, 1.0), 3.0, seconds=20_000.0)
    waits = [visit.begun - visit.call.at for visit in run.visits]
    chance = erlang_c(4, 3.0)
    assert sum(wait > 1e-9 for wait in waits) / len(waits) == pytest.approx(chance, rel=0.06)
    assert fmean(waits) == pytest.approx(chance / (4 - 3), rel=0.1)


def test_seats_that_share_one_server_are_served_in_turn() -> None:
    """M/M/1 with processor sharing: the same mean, and whoever wants twice as much stays twice as long."""
    load = 0.6
    run = queue(steady(200, 1.0, shared=True), load)
    assert fmean(v.done - v.call.at for v in run.visits) == pytest.approx(1 / (1 - load), rel=0.06)
    short = [v for v in run.visits if 0.4 * LONG < v.call.output < 0.6 * LONG]
    long = [v for v in run.visits if 1.8 * LONG < v.call.output < 2.2 * LONG]
    stays = [fmean(v.done - v.call.at for v in some) / fmean(v.call.output for v in some) for some in (short, long)]
    assert stays[0] == pytest.approx(stays[1], rel=0.1)


@pytest.fixture(scope="module")
def real() -> Pace:
    target = placed("llama-3.1-8b")
    return pace_of(target, find_guesser("eagle", target), 16, 1000, 900, 0.7, 8, "load", None)


BUSY = Demand(rate=18.0, prompt=900.0, output=200.0, prefixes=40, prefix_tokens=600.0)


@pytest.mark.parametrize("routing", ROUTES)
@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_nothing_is_lost_and_nothing_comes_from_nowhere(real: Pace, routing: str, arrivals: str) -> None:
    demand = replace(BUSY, arrivals=arrivals)
    coming = calls(demand, 120.0, 3)
    run = simulate(Fleet(3, real, known_prefixes=10, prefix_tokens=600.0), coming, route_of(routing, 3), 120.0)
    assert [visit.call for visit in run.visits] == coming, "everybody is served, once"
    for visit in run.visits:
        assert visit.call.at <= visit.begun <= visit.first <= visit.done <= run.end
    # Little's law holds to the last digit: time spent here is people times seconds.
    assert sum(tally.texts for tally in run.tallies) == pytest.approx(sum(v.done - v.call.at for v in run.visits))
    assert sum(tally.seated for tally in run.tallies) == pytest.approx(sum(v.done - v.begun for v in run.visits))
    assert sum(tally.written for tally in run.tallies) == pytest.approx(sum(c.output - 1 for c in coming), rel=1e-6)
    assert sum(tally.read for tally in run.tallies) == pytest.approx(sum(v.to_read for v in run.visits), rel=1e-6)
    for number, tally in enumerate(run.tallies):
        assert 0 < tally.busy <= run.end and tally.seated <= 16 * tally.busy * (1 + 1e-9)
        begun = [v.begun for v in run.visits if v.replica == number]
        assert begun == sorted(begun), "who comes first is taken up first"


def test_no_text_is_faster_than_alone(real: Pace) -> None:
    run = simulate(Fleet(2, real), calls(BUSY, 60.0, 5), route_of("least-loaded", 5), 60.0)
    assert min(run.per_tokens) >= (1 / real.steps[1].rate) * (1 - 1e-6)


def test_routing_by_prefix_finds_more_in_caches(real: Pace) -> None:
    coming = calls(BUSY, 200.0, 7)
    fleet = Fleet(4, real, known_prefixes=10, prefix_tokens=600.0)
    runs = {name: simulate(fleet, coming, route_of(name, 7), 200.0) for name in ROUTES}
    assert runs["prefix"].cached_share > 1.2 * runs["random"].cached_share > 0
    assert fmean(runs["prefix"].first_tokens) < fmean(runs["random"].first_tokens)
    assert quantile(runs["least-loaded"].first_tokens, 0.99) < quantile(runs["random"].first_tokens, 0.99)  # type: ignore[operator]
    nothing = simulate(Fleet(4, real), coming, route_of("prefix", 7), 200.0)
    assert nothing.cached_share == 0


def test_guessing_by_load_is_never_slower_than_always_or_never() -> None:
    target = placed("llama-3.1-8b")
    guesser = find_guesser("llama-3.2-1b", target)
    paces = {
        mode: pace_of(target, guesser, 256, 4096, 4000, 0.35, 8, mode, None)  # type: ignore[arg-type]
        for mode in ("on", "off", "load")
    }
    for texts in range(1, 257):
        rates = {mode: pace.writing(texts, reading=False) for mode, pace in paces.items()}
        assert rates["load"] >= max(rates["on"], rates["off"]) * (1 - 1e-12)
    assert paces["on"].writing(1, False) > paces["off"].writing(1, False)
    assert paces["on"].writing(256, False) < paces["off"].writing(256, False), "or this would test nothing"


def test_a_prompt_slows_those_who_are_written_for(real: Pace) -> None:
    assert real.writing(8, reading=True) < real.writing(8, reading=False)
    assert real.reading(8) < real.reading(0)


def test_a_seed_decides_everything(real: Pace) -> None:
    one, same, other = (calls(BUSY, 30.0, seed) for seed in (1, 1, 2))
    assert one == same != other
    runs = [simulate(Fleet(2, real), one, route_of("random", 1), 30.0) for _ in range(2)]
    assert runs[0].first_tokens == runs[1].first_tokens


def test_demand_has_the_means_that_were_asked_for() -> None:
    for arrivals in ("poisson", "bursty"):
        coming = calls(replace(BUSY, arrivals=arrivals), 1500.0, 11)  # type: ignore[arg-type]
        assert len(coming) / 1500 == pytest.approx(BUSY.rate, rel=0.08)
        assert fmean(call.prompt for call in coming) == pytest.approx(900, rel=0.05)
        assert fmean(call.output for call in coming) == pytest.approx(200, rel=0.05)
    counts = {name: _counts(replace(BUSY, arrivals=name)) for name in ("poisson", "bursty")}  # type: ignore[arg-type]
    assert counts["bursty"] > 2 * counts["poisson"], "bursts come in crowds"
    popular = [call.prefix for call in calls(BUSY, 3000.0, 11)]
    assert popular.count(0) > 5 * popular.count(39) > 0


def _counts(demand: Demand) -> float:
    """The variance of calls a second over their mean, which is 1 for a Poisson process."""
    seconds = [0] * 1000
    for call in calls(demand, 1000.0, 13):
        seconds[int(call.at)] += 1
    mean = fmean(seconds)
    return fmean((count - mean) ** 2 for count in seconds) / mean


def test_the_smallest_fleet_that_does(real: Pace) -> None:
    demand = replace(BUSY, rate=60.0)
    trial = Trial(Fleet(1, real), calls(demand, 60.0, 1), "least-loaded", 60.0, 1, Goals(0.5, 0.02), 3.0)
    found = trial.fewest()
    assert found.goals.met_by(found.run)
    assert found.fleet.replicas > 1 and not trial.goals.met_by(trial.of(found.fleet.replicas - 1).run)
    told = found.as_json()
    assert told["dollars_per_hour"] == 3.0 * found.fleet.replicas
    assert told["dollars_per_million_tokens"] == pytest.approx(
        told["dollars_per_hour"] / 3600 / told["tokens_per_second"] * 1e6
    )


def test_a_straggler_does_not_change_what_is_written_in_a_second() -> None:
    """One text that takes as long again as all others together, at the pace of one."""
    pace, seconds = steady(4, 1.0), 1000.0
    usual = calls(Demand(rate=2.0, prompt=1.0, output=LONG, lengths="exponential"), seconds, 2)
    runs = [
        simulate(Fleet(1, pace), some, route_of("random", 2), seconds)
        for some in (usual, [*usual, replace(usual[-1], at=seconds, number=len(usual), output=1e3 * LONG)])
    ]
    assert runs[1].end > 1.9 * runs[0].end
    for name in ("tokens_per_second", "utilisation", "texts_served", "texts_at_once"):
        assert getattr(runs[1], name) == pytest.approx(getattr(runs[0], name), rel=1e-3), name
    late = [call.output for call in usual if call.at >= 0.1 * seconds]
    assert runs[0].tokens_per_second == pytest.approx(sum(late) / (0.9 * seconds), rel=0.03)


def test_a_fleet_that_is_too_small_does_not_keep_up(real: Pace) -> None:
    demand = replace(BUSY, rate=100.0)
    run = simulate(Fleet(1, real), calls(demand, 60.0, 1), route_of("random", 1), 60.0)
    assert not run.keeps_up and run.utilisation > 0.95
