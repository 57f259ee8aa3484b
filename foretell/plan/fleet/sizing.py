"""How many copies a demand needs, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.errors import CapacityError
from foretell.plan.fleet.arrivals import SimulatedRequest
from foretell.plan.fleet.simulate import FleetRun, FleetSpec, quantile, route_of, simulate

MOST_REPLICAS = 1024
MILLION, HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class FleetSlo:
    """Seconds that 99 of 100 calls must not exceed; None is no matter."""

    ttft: float | None = None
    tpot: float | None = None

    def met_by(self, run: FleetRun) -> bool:
        """Whether a run keeps up with what comes, and is as quick as is wanted."""
        pairs = ((self.ttft, run.ttfts), (self.tpot, run.tpots))
        return run.keeps_up and all(goal is None or (quantile(times, 0.99) or 0.0) <= goal for goal, times in pairs)


@dataclass(frozen=True)
class SizedFleet:
    """A fleet, a run of it, and its price."""

    fleet: FleetSpec
    run: FleetRun
    slo: FleetSlo
    dollars_per_hour: float  # of one copy

    @property
    def dollars_per_million(self) -> float | None:
        """For tokens that were written, whether the fleet was busy or not."""
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
    """A demand that fleets of any size are tried with."""

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
        """The smallest fleet that meets the goals: doubled until one does, then halved in between."""
        low, found = 0, self.simulate(1)
        while not self.slo.met_by(found.run):
            low = found.fleet.replicas
            if low >= MOST_REPLICAS:
                raise CapacityError(
                    f"{low} copies do not meet the goals; a single text may be too slow: "
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


NAME, VALUE = 39, 17  # widths of the columns


def fleet_report(trial: FleetTrial, found: SizedFleet, asked_for: bool) -> str:
    """What was tried, what came of it, and whether that is enough."""
    run, told = found.run, found.as_json()
    copies = found.fleet.replicas
    first = f"{copies} {'copy' if copies == 1 else 'copies'}"
    verdict = "meets the goals" if told["meets_goals"] else "does not meet the goals"
    fleet = f"{first} of {found.fleet.service.max_num_seqs} seats, routed {trial.routing}"
    lines = [
        f"{fleet}: {verdict}." if asked_for else f"{fleet}, is the smallest fleet that does.",
        "",
        f"| {'':<{NAME}} | {'':>{VALUE}} |",
        f"| {'-' * NAME} | {'-' * (VALUE - 1)}: |",
        _line("requests served", f"{len(run.requests):,}"),
        _line("first token, half / 99 of 100 within", _pair(told["first_token_p50"], told["first_token_p99"], "s")),
        _line("a later token, likewise", _pair(told["per_token_p50"], told["per_token_p99"], "ms")),
        _line("tokens/s", f"{run.tokens_per_second:,.0f}"),
        _line("a copy has work", f"{run.utilisation:.0%} of the time"),
        _line("seats taken", f"{told['seats_taken']:.0%}"),
        _line("texts on a copy, waiting ones included", f"{run.sequences_per_replica:.1f}"),
        _line("of the prompts, found in a cache", f"{run.cached_share:.0%}"),
        _line("dollars an hour", f"{told['dollars_per_hour']:.2f}"),
        _line("dollars a million written tokens", _dollars(told["dollars_per_million_tokens"])),
    ]
    if not run.keeps_up:
        lines += ["", "It does not keep up: more came than was served, and times grow with --seconds. Add copies."]
    return "\n".join(lines)


def _line(name: str, value: str) -> str:
    return f"| {name:<{NAME}} | {value:>{VALUE}} |"


def _pair(half: float | None, most: float | None, unit: str) -> str:
    if half is None or most is None:
        return "-"
    scale, places = (1e3, 1) if unit == "ms" else (1.0, 3)
    return f"{scale * half:.{places}f} / {scale * most:.{places}f} {unit}"


def _dollars(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
