"""`bench load`: concurrent clients of a server; variants take turns in time slices at each load."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

from foretell.errors import RequestError
from foretell.utils.report_table import ReportTable

from .http_client import Address, ClosedLoop, Level, StreamResult, stream_request, suggestion
from .intervals import INTERVAL, Estimate, compared, interval, mean_ratio, over_rounds
from .measure import ProgressCallback, rotated
from .metrics import Latency, OverallRow, as_row, json_name, mean_over_cells
from .peers import target_steps
from .prompt import BenchPrompt
from .settings import LoadSettings

OFF, AUTO, ON = "off", "auto", "on"


@dataclass(frozen=True)
class LoadVariant:
    """A server and the speculation fields of its requests."""

    name: str
    address: Address
    extra: Mapping[str, Any] = field(default_factory=dict)


def variants_of(adaptive: Address, fixed: Address | None) -> list[LoadVariant]:
    """Return speculation off and auto, by a field of the request; a fixed length needs a server of its own."""
    found = [LoadVariant(OFF, adaptive, {"speculative": False}), LoadVariant(AUTO, adaptive)]
    return found if fixed is None else [*found, LoadVariant(ON, fixed)]


@dataclass(frozen=True)
class LoadSlice:
    """Results of one turn of a variant, from the first request to the last response."""

    results: Sequence[StreamResult]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(result.tokens for result in self.results)

    def tokens_per_second(self, closed: bool) -> float | None:
        """Return the total throughput in a closed loop, else the median speed of one request."""
        if closed:
            return self.tokens / self.seconds if self.tokens else None
        times = [result.seconds_per_token for result in self.results if result.seconds_per_token]
        return 1 / median(times) if times else None


@dataclass(frozen=True)
class LoadCell:
    """The result of one variant at one load; `speedup` is its tokens per second over those of plain decoding.

    Slices of the same turn are compared. Times are in seconds.
    """

    load: str
    variant: str = field(metadata=json_name("arm"))
    requests: int
    errors: int
    reasons: dict[str, int]
    tokens: int
    tokens_per_second: float
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    accepted_per_step: float | None = None  # None if the server does not report it
    # Equal to the output with speculation off; None if that is not promised or no request was sent twice.
    same_text: bool | None = None
    first_token: Latency | None = None
    per_token: Latency | None = None  # mean time per token after the first, by request
    ratios: Sequence[float] = ()  # by turn, to recompute intervals from
    estimate: Estimate | None = field(default=None, repr=False, metadata=json_name(None))


@dataclass(frozen=True)
class LoadResult:
    """The result of one run, and the exception that stopped it early."""

    conditions: dict[str, Any]
    cells: tuple[LoadCell, ...]
    stopped: BaseException | None = None

    @property
    def errors(self) -> int:
        return sum(cell.errors for cell in self.cells)

    @property
    def same_text(self) -> bool:
        return all(cell.same_text is not False for cell in self.cells)

    @property
    def overall(self) -> tuple[OverallRow, ...]:
        """Return the mean of each variant over all loads."""
        variants = dict.fromkeys(cell.variant for cell in self.cells)
        return tuple(
            mean_over_cells(variant, [cell for cell in self.cells if cell.variant == variant]) for variant in variants
        )

    @property
    def auto_over_better(self) -> dict[str, float]:
        """Return by load the speedup of `auto` over that of the best other variant."""
        found: dict[str, float] = {}
        for load in dict.fromkeys(cell.load for cell in self.cells):
            speedups = {c.variant: c.speedup for c in self.cells if c.load == load and c.speedup is not None}
            if AUTO in speedups and len(speedups) > 1:
                found[load] = speedups[AUTO] / max(speedup for variant, speedup in speedups.items() if variant != AUTO)
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "load",
            **self.conditions,
            "complete": self.stopped is None,
            "errors": self.errors,
            "same_text": self.same_text,
            "auto_over_better": self.auto_over_better,
            "overall": [as_row(each) for each in self.overall],
            "cells": [as_row(cell) for cell in self.cells],
        }


def request_bodies(
    items: Sequence[BenchPrompt], settings: LoadSettings, variant: LoadVariant, seed: str, run: str
) -> Iterator[dict[str, Any]]:
    """Yield endless requests in an order that the seed decides, the same for every variant.

    Each pass over the prompts has a cache salt of its own, so that no request hits the prefix cache.
    """
    order = list(items)
    random.Random(seed).shuffle(order)
    for time in itertools.count():
        for item in order:
            yield {
                **item.request,
                "max_tokens": min(item.max_tokens, settings.max_tokens),
                "seed": zlib.crc32(f"{item.id} {time}".encode()),
                "cache_salt": f"{run} {variant.name} {seed} {time}",
                "stream": True,
                "stream_options": {"include_usage": True},
                **({} if settings.temperature is None else {"temperature": settings.temperature}),
                **variant.extra,
            }


def check_servers(variants: Sequence[LoadVariant], items: Sequence[BenchPrompt], settings: LoadSettings) -> None:
    """Send one request to each variant as warm-up; a server that does not respond is an error before any load."""
    for variant in variants:
        result = asyncio.run(
            stream_request(
                variant.address, next(request_bodies(items, settings, variant, "check", secrets.token_hex(4)))
            )
        )
        if result.error is not None:
            where = f"{variant.address.host}:{variant.address.port}"
            raise RequestError("base_url", f"{where} does not serve: {result.error}; {suggestion(result.error)}")


def run_load(
    variants: Sequence[LoadVariant],
    items: Sequence[BenchPrompt],
    settings: LoadSettings,
    progress: ProgressCallback,
    conditions: dict[str, Any],
) -> LoadResult:
    """Run every load, turn and variant; a stopped run keeps what was finished."""
    found: dict[tuple[Level, str], list[LoadSlice]] = {}
    run, stopped = secrets.token_hex(4), None
    turns = [
        (level, turn, variant)
        for level in settings.levels
        for turn in range(settings.turns)
        for variant in rotated(variants, turn)
    ]
    try:
        for done, (level, turn, variant) in enumerate(turns):
            progress(done, len(turns), f"{level}, {variant.name}")
            seed = f"{level}, turn {turn}"
            params = request_bodies(items, settings, variant, seed, run)
            seconds = settings.seconds / settings.turns / len(variants)
            finished = run_slice(level, variant, params, seconds, seed)
            found.setdefault((level, variant.name), []).append(finished)
        progress(len(turns), len(turns), "done")
    except BaseException as error:
        if not found:
            raise  # nothing was finished
        stopped = error
    cells = [cell_of(level, name, slices, found.get((level, OFF), ())) for (level, name), slices in found.items()]
    return LoadResult(conditions, tuple(cells), stopped)


def run_slice(
    level: Level, variant: LoadVariant, params: Iterator[Mapping[str, Any]], seconds: float, seed: str
) -> LoadSlice:
    """Run one turn of a variant."""

    async def send(body: Mapping[str, Any]) -> StreamResult:
        return replace(await stream_request(variant.address, body), request_key=str(body["seed"]))

    began = perf_counter()
    results = asyncio.run(level.run(send, params, seconds, seed))
    return LoadSlice(results, perf_counter() - began)


def cell_of(level: Level, variant: str, slices: Sequence[LoadSlice], plain: Sequence[LoadSlice]) -> LoadCell:
    """Summarize the slices of a variant; `plain` are those of plain decoding."""
    results = [result for each in slices for result in each.results]
    good = [result for result in results if result.error is None]
    first = [result.first for result in good if result.first is not None]
    later = [result.seconds_per_token for result in good if result.seconds_per_token is not None]
    ratios = _ratios(slices, plain, isinstance(level, ClosedLoop))
    estimate = over_rounds([ratios])
    return LoadCell(
        load=str(level),
        variant=variant,
        requests=len(results),
        errors=len(results) - len(good),
        reasons=dict(Counter(result.error for result in results if result.error is not None)),
        tokens=sum(each.tokens for each in slices),
        tokens_per_second=sum(each.tokens for each in slices) / sum(each.seconds for each in slices),
        speedup=mean_ratio(estimate, [ratios]) if ratios else None,
        speedup_interval=interval(estimate),
        accepted_per_step=_accepted(good),
        same_text=_same(good, [result for each in plain for result in each.results if result.error is None]),
        first_token=Latency.of(first),
        per_token=Latency.of(later),
        ratios=ratios,
        estimate=estimate,
    )


def _accepted(results: Sequence[StreamResult]) -> float | None:
    """Return the tokens per step over the results that report their steps."""
    counts = [(result.tokens, steps) for result in results if (steps := target_steps(result))]
    return sum(tokens for tokens, _ in counts) / sum(steps for _, steps in counts) if counts else None


def _same(results: Sequence[StreamResult], plain: Sequence[StreamResult]) -> bool | None:
    """Return whether equal requests got equal outputs, if the server's rule promises that."""
    outputs = {result.request_key: result.text for result in plain if result.text}
    kept = [result for result in results if result.request_key in outputs and result.text]
    same = [result.text == outputs[result.request_key] for result in kept if must_match(result)]
    return all(same) if same else None


def must_match(result: StreamResult) -> bool:
    """Return whether the rule promises equal tokens for a seed: only `match` does for sampled requests."""
    return bool((result.extra.get("speculation") or {}).get("rule") == "match")


def _ratios(slices: Sequence[LoadSlice], plain: Sequence[LoadSlice], closed: bool) -> list[float]:
    """Return the ratios of slices of the same turn; a slice without a plain one, as in a stopped run, is left out."""
    pairs = [
        (ours.tokens_per_second(closed), theirs.tokens_per_second(closed))
        for ours, theirs in zip(slices, plain, strict=False)
    ]
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]


HEAD = (
    "load",
    "drafts",
    "requests",
    "tokens/s",
    "TTFT p50 / p99 ms",
    "TPOT p50 / p99 ms",
    "speedup",
    INTERVAL,
    "accepted per step",
    "same text",
)


def report_table(result: LoadResult) -> ReportTable:
    """Return a table with a row for each load and variant."""
    return ReportTable(HEAD, [_row(cell) for cell in result.cells], words=2)


def remarks(result: LoadResult) -> list[str]:
    """Return the notes below the table."""
    lines = [
        "TTFT is the time to the first token, TPOT the time per output token after it. Speedup: tokens per second over "
        "those with speculation off, by pairs of slices (at a request rate: of one request, after its first token)."
    ]
    if all(cell.variant != ON for cell in result.cells):
        lines.append(
            "A fixed draft length is a setting of the server, not of a request, so off and auto are compared. "
            "--fixed-url names a server that was started with --num-speculative-tokens."
        )
    for load, ratio in result.auto_over_better.items():
        lines.append(f"{load}: auto has {ratio:.2f} of the speed of the best other variant.")
    for cell in result.cells:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in cell.reasons.items())
        if cell.same_text is False:
            lines.append(f"NOT THE SAME TEXT as with speculation off: {cell.load}, {cell.variant}.")
        if reasons:
            lines.append(f"ERRORS, {cell.load}, {cell.variant}: {reasons}.")
    if result.stopped is not None:
        lines.append("Stopped early: the table has the finished part. Run the command again for all of it.")
    return lines


def _row(cell: LoadCell) -> list[str]:
    return [
        cell.load,
        cell.variant,
        f"{cell.requests} ({cell.errors} failed)" if cell.errors else str(cell.requests),
        f"{cell.tokens_per_second:.1f}",
        _p50_p99(cell.first_token),
        _p50_p99(cell.per_token),
        *compared(cell.speedup, cell.speedup_interval),
        "-" if cell.accepted_per_step is None else f"{cell.accepted_per_step:.2f}",
        {True: "yes", False: "NO", None: "-"}[cell.same_text],
    ]


def _p50_p99(times: Latency | None) -> str:
    return "- / -" if times is None else f"{1000 * times.p50:.1f} / {1000 * times.p99:.1f}"
