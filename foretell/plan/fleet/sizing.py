"""Fleet sizing: the fewest replicas that meet the SLOs, their price, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.errors import CapacityError
from foretell.plan.fleet.arrivals import SimulatedRequest
from foretell.plan.fleet.simulate import FleetRun, FleetSpec, quantile, route_of, simulate
from foretell.utils.report_table import ReportTable

MOST_REPLICAS = 1024
MILLION, HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class FleetSlo:
    """Upper bounds on p99 latencies in seconds; None for no bound."""

    ttft: float | None = None
    tpot: float | None = None

    def met_by(self, run: FleetRun) -> bool:
        """Return whether a run keeps up with its arrivals and meets the bounds."""
        pairs = ((self.ttft, run.ttfts), (self.tpot, run.tpots))
        return run.keeps_up and all(bound is None or (quantile(times, 0.99) or 0.0) <= bound for bound, times in pairs)


@dataclass(frozen=True)
class SizedFleet:
    """A fleet, its simulated run, and its price."""

    fleet: FleetSpec
    run: FleetRun
    slo: FleetSlo
    dollars_per_hour: float  # of one replica

    @property
    def dollars_per_million(self) -> float | None:
        """Return the price of a million output tokens, idle time included."""
        rate = self.run.tokens_per_second
        return self.fleet.replicas * self.dollars_per_hour / HOUR / rate * MILLION if rate else None

    def as_json(self) -> dict[str, Any]:
        first, later = self.run.ttfts, self.run.tpots
        return {
            "replicas": self.fleet.replicas,
            "meets_goals": self.slo.met_by(self.run),
            "keeps_up": self.run.keeps_up,
            "calls": len(self.run.requests),
            "first_token_p50": quantile(first, 0.5),
            "first_token_p99": quantile(first, 0.99),
            "per_token_p50": quantile(later, 0.5),
            "per_token_p99": quantile(later, 0.99),
            "tokens_per_second": self.run.tokens_per_second,
            "utilisation": self.run.utilisation,
            "seats_taken": self.run.running_per_replica / self.fleet.service.max_num_seqs,
            "texts_at_once": self.run.sequences_per_replica,
            "cached_share": self.run.cached_share,
            "dollars_per_hour": self.fleet.replicas * self.dollars_per_hour,
            "dollars_per_million_tokens": self.dollars_per_million,
        }


@dataclass(frozen=True)
class FleetTrial:
    """Requests and SLOs that fleets of any size are simulated with."""

    fleet: FleetSpec
    requests: Sequence[SimulatedRequest]
    routing: str
    seconds: float
    seed: int
    slo: FleetSlo
    dollars_per_hour: float

    def simulate(self, replicas: int) -> SizedFleet:
        fleet = replace(self.fleet, replicas=replicas)
        run = simulate(fleet, self.requests, route_of(self.routing, self.seed), self.seconds)
        return SizedFleet(fleet, run, self.slo, self.dollars_per_hour)

    def smallest(self) -> SizedFleet:
        """Return the smallest fleet that meets the SLOs, by doubling and then bisection."""
        low, found = 0, self.simulate(1)
        while not self.slo.met_by(found.run):
            low = found.fleet.replicas
            if low >= MOST_REPLICAS:
                raise CapacityError(
                    f"{low} replicas do not meet the SLOs; a single request may be too slow: "
                    "raise --ttft or --tpot, or take faster devices"
                )
            found = self.simulate(min(MOST_REPLICAS, 2 * low))
        while found.fleet.replicas - low > 1:
            tried = self.simulate((low + found.fleet.replicas) // 2)
            if self.slo.met_by(tried.run):
                found = tried
            else:
                low = tried.fleet.replicas
        return found


def fleet_report(trial: FleetTrial, found: SizedFleet, asked_for: bool) -> list[str | ReportTable]:
    """Return the summary, the figures, and a warning if the fleet is overloaded; `asked_for` by its size."""
    run, figures = found.run, found.as_json()
    rows = [
        ("requests served", f"{len(run.requests):,}"),
        ("time to first token, p50 / p99", _pair(figures["first_token_p50"], figures["first_token_p99"], "s")),
        ("time per output token, p50 / p99", _pair(figures["per_token_p50"], figures["per_token_p99"], "ms")),
        ("tokens/s", f"{run.tokens_per_second:,.0f}"),
        ("utilisation", f"{run.utilisation:.0%}"),
        ("batch slots in use", f"{figures['seats_taken']:.0%}"),
        ("requests per replica, with waiting ones", f"{run.sequences_per_replica:.1f}"),
        ("prompt tokens from the prefix cache", f"{run.cached_share:.0%}"),
        ("dollars per hour", f"{figures['dollars_per_hour']:.2f}"),
        ("dollars per million output tokens", _dollars(figures["dollars_per_million_tokens"])),
    ]
    blocks: list[str | ReportTable] = [_summary(trial, found, asked_for), ReportTable(("", ""), rows)]
    if not run.keeps_up:
        blocks.append("The fleet is overloaded: its queue grows, and latencies grow with --seconds. Add replicas.")
    return blocks


def _summary(trial: FleetTrial, found: SizedFleet, asked_for: bool) -> str:
    """Return one sentence; without SLOs a fleet can only keep up with its requests or not."""
    replicas, slo, met = found.fleet.replicas, found.slo, found.slo.met_by(found.run)
    count = f"{replicas} {'replica' if replicas == 1 else 'replicas'}"
    fleet = f"{count} with batches up to {found.fleet.service.max_num_seqs}, routing {trial.routing}"
    if slo == FleetSlo():
        does, does_not = "keeps up with the requests", "does not keep up with the requests"
        note = " No SLO was given: set --ttft or --tpot."
    else:
        does, does_not = "meets the SLOs", "does not meet the SLOs"
        note = ""
    if not asked_for:
        return f"{fleet}: the smallest fleet that {does}.{note}"
    return f"{fleet}: {does if met else does_not}.{note}"


def _pair(p50: float | None, p99: float | None, unit: str) -> str:
    if p50 is None or p99 is None:
        return "-"
    scale, digits = (1e3, 1) if unit == "ms" else (1.0, 3)
    return f"{scale * p50:.{digits}f} / {scale * p99:.{digits}f} {unit}"


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
