"""A fleet for people."""

from __future__ import annotations

from .sizing import Staffing, Trial

NAME, VALUE = 39, 17  # widths of the columns


def words(trial: Trial, found: Staffing, asked_for: bool) -> str:
    """What was tried, what came of it, and whether that is enough."""
    run, told = found.run, found.as_json()
    copies = found.fleet.replicas
    first = f"{copies} {'copy' if copies == 1 else 'copies'}"
    verdict = "meets the goals" if told["meets_goals"] else "does not meet the goals"
    lines = [
        f"{first} of {found.fleet.pace.seats} seats, routed {trial.routing}: {verdict}."
        if asked_for
        else f"{first} of {found.fleet.pace.seats} seats, routed {trial.routing}, is the smallest fleet that does.",
        "",
        f"| {'':<{NAME}} | {'':>{VALUE}} |",
        f"| {'-' * NAME} | {'-' * (VALUE - 1)}: |",
        _line("requests served", f"{len(run.visits):,}"),
        _line("first token, half / 99 of 100 within", _pair(told["first_token_p50"], told["first_token_p99"], "s")),
        _line("a later token, likewise", _pair(told["per_token_p50"], told["per_token_p99"], "ms")),
        _line("tokens/s", f"{run.tokens_per_second:,.0f}"),
        _line("a copy has work", f"{run.utilisation:.0%} of the time"),
        _line("seats taken", f"{told['seats_taken']:.0%}"),
        _line("texts on a copy, waiting ones included", f"{run.texts_at_once:.1f}"),
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
