"""Many callers of a server: arms take turns in slices, and each level of load is told by itself."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

from foretell.bench.http_client import Address, Answer, ClosedLoop, Level, ask, remedy
from foretell.bench.intervals import Estimate, Overall, as_row, interval, mean_ratio, over_all, over_rounds, shown
from foretell.bench.latency import Latency
from foretell.bench.measure import Watch, rotated
from foretell.bench.peers import steps_told
from foretell.bench.prompt import BenchPrompt
from foretell.errors import RequestError

OFF, AUTO, ON = "off", "auto", "on"


@dataclass(frozen=True)
class LoadArm:
    """One way to be served: where, and what the requests say of speculation."""

    name: str
    address: Address
    extra: Mapping[str, Any] = field(default_factory=dict)


def arms_of(adaptive: Address, fixed: Address | None) -> list[LoadArm]:
    """None and the server's own choice by a field of the request; a fixed length is a setting of another server."""
    found = [LoadArm(OFF, adaptive, {"speculative": False}), LoadArm(AUTO, adaptive)]
    return found if fixed is None else [*found, LoadArm(ON, fixed)]


@dataclass(frozen=True)
class LoadPlan:
    """`seconds` are those of a level, shared by the arms; each arm has `turns` slices of it."""

    levels: tuple[Level, ...]
    seconds: float = 120.0
    turns: int = 3
    max_tokens: int = 64
    temperature: float | None = None  # None: as the server's model recommends

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise RequestError("seconds", f"must be above 0, not {self.seconds}")
        for name in ("turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")


@dataclass(frozen=True)
class Slice:
    """What came of one arm's turn, from the first request to the last answer."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    def pace(self, closed: bool) -> float | None:
        """Tokens a second: of all where callers wait for answers, of one text where they come when they like."""
        if closed:
            return self.tokens / self.seconds if self.tokens else None
        times = [answer.a_token for answer in self.answers if answer.a_token]
        return 1 / median(times) if times else None


@dataclass(frozen=True)
class LoadCell:
    """One arm at one level. Times are seconds; `speedup` is its pace over plain decoding's, by pairs of slices."""

    load: str
    arm: str
    requests: int
    errors: int
    reasons: dict[str, int]
    tokens: int
    tokens_per_second: float
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    accepted_per_step: float | None = None  # where the server tells
    # As with speculation off; None where that is not promised, or nothing was asked twice.
    same_text: bool | None = None
    first_token: Latency | None = None
    per_token: Latency | None = None  # of each text the mean behind its first words
    ratios: Sequence[float] = ()  # by turn, so that an interval can be computed again
    estimate: Estimate | None = field(default=None, repr=False)


@dataclass(frozen=True)
class LoadFindings:
    """All that one run found, and what ended it before its time."""

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
    def overall(self) -> tuple[Overall, ...]:
        """Each arm over all loads."""
        arms = dict.fromkeys(cell.arm for cell in self.cells)
        return tuple(over_all(arm, [cell for cell in self.cells if cell.arm == arm]) for arm in arms)

    @property
    def auto_over_better(self) -> dict[str, float]:
        """By load: the speedup of `auto` over the better of the others."""
        found: dict[str, float] = {}
        for load in dict.fromkeys(cell.load for cell in self.cells):
            paces = {c.arm: c.speedup for c in self.cells if c.load == load and c.speedup is not None}
            if AUTO in paces and len(paces) > 1:
                found[load] = paces[AUTO] / max(pace for arm, pace in paces.items() if arm != AUTO)
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "load",
            **self.conditions,
            "complete": self.stopped is None,
            "errors": self.errors,
            "same_text": self.same_text,
            "auto_over_better": self.auto_over_better,
            "overall": [asdict(each) for each in self.overall],
            "cells": [as_row(cell) for cell in self.cells],
        }


def bodies(items: Sequence[BenchPrompt], plan: LoadPlan, arm: LoadArm, seed: str, run: str) -> Iterator[dict[str, Any]]:
    """Requests without end, in an order the seed decides, the same for every arm.

    Each pass over the prompts has a salt of its own, so that nobody finds in a cache what was asked before.
    """
    order = list(items)
    random.Random(seed).shuffle(order)
    for time in itertools.count():
        for item in order:
            yield {
                **item.request,
                "max_tokens": min(item.max_tokens, plan.max_tokens),
                "seed": zlib.crc32(f"{item.id} {time}".encode()),
                "cache_salt": f"{run} {arm.name} {seed} {time}",
                "stream": True,
                "stream_options": {"include_usage": True},
                **({} if plan.temperature is None else {"temperature": plan.temperature}),
                **arm.extra,
            }


def check(arms: Sequence[LoadArm], items: Sequence[BenchPrompt], plan: LoadPlan) -> None:
    """One request to each arm, which also warms it; a server that is not there is told before any load."""
    for arm in arms:
        answer = asyncio.run(ask(arm.address, next(bodies(items, plan, arm, "check", secrets.token_hex(4)))))
        if answer.error is not None:
            where = f"{arm.address.host}:{arm.address.port}"
            raise RequestError("base_url", f"{where} does not serve: {answer.error}; {remedy(answer.error)}")


def run_load(
    arms: Sequence[LoadArm], items: Sequence[BenchPrompt], plan: LoadPlan, watch: Watch, conditions: dict[str, Any]
) -> LoadFindings:
    """Every level, every turn, every arm. Whatever stops it leaves what was found until then."""
    found: dict[tuple[Level, str], list[Slice]] = {}
    run, stopped = secrets.token_hex(4), None
    turns = [(level, turn, arm) for level in plan.levels for turn in range(plan.turns) for arm in rotated(arms, turn)]
    try:
        for done, (level, turn, arm) in enumerate(turns):
            watch(done, len(turns), f"{level}, {arm.name}")
            seed = f"{level}, turn {turn}"
            asked = bodies(items, plan, arm, seed, run)
            seconds = plan.seconds / plan.turns / len(arms)
            found.setdefault((level, arm.name), []).append(serve_slice(level, arm, asked, seconds, seed))
        watch(len(turns), len(turns), "done")
    except BaseException as error:
        if not found:
            raise  # there is nothing to leave
        stopped = error
    cells = [cell_of(level, name, slices, found.get((level, OFF), ())) for (level, name), slices in found.items()]
    return LoadFindings(conditions, tuple(cells), stopped)


def serve_slice(level: Level, arm: LoadArm, asked: Iterator[Mapping[str, Any]], seconds: float, seed: str) -> Slice:
    """One arm's turn."""

    async def send(body: Mapping[str, Any]) -> Answer:
        return replace(await ask(arm.address, body), key=str(body["seed"]))

    began = perf_counter()
    answers = asyncio.run(level.run(send, asked, seconds, seed))
    return Slice(answers, perf_counter() - began)


def cell_of(level: Level, arm: str, slices: Sequence[Slice], plain: Sequence[Slice]) -> LoadCell:
    """What an arm's slices say together; `plain` are those of plain decoding."""
    answers = [answer for each in slices for answer in each.answers]
    good = [answer for answer in answers if answer.error is None]
    first = [answer.first for answer in good if answer.first is not None]
    later = [answer.a_token for answer in good if answer.a_token is not None]
    ratios = _ratios(slices, plain, isinstance(level, ClosedLoop))
    estimate = over_rounds([ratios])
    return LoadCell(
        load=str(level),
        arm=arm,
        requests=len(answers),
        errors=len(answers) - len(good),
        reasons=dict(Counter(answer.error for answer in answers if answer.error is not None)),
        tokens=sum(each.tokens for each in slices),
        tokens_per_second=sum(each.tokens for each in slices) / sum(each.seconds for each in slices),
        speedup=mean_ratio(estimate, [ratios]) if ratios else None,
        speedup_interval=interval(estimate),
        accepted_per_step=_accepted(good),
        same_text=_same(good, [answer for each in plain for answer in each.answers if answer.error is None]),
        first_token=Latency.of(first),
        per_token=Latency.of(later),
        ratios=ratios,
        estimate=estimate,
    )


def _accepted(answers: Sequence[Answer]) -> float | None:
    """Tokens a step, over the answers that tell."""
    told = [(answer.tokens, steps) for answer in answers if (steps := steps_told(answer))]
    return sum(tokens for tokens, _ in told) / sum(steps for _, steps in told) if told else None


def _same(answers: Sequence[Answer], plain: Sequence[Answer]) -> bool | None:
    """Whether who asked the same got the same text, where the server's rule promises that."""
    texts = {answer.key: answer.text for answer in plain if answer.text}
    kept = [answer for answer in answers if answer.key in texts and answer.text]
    same = [answer.text == texts[answer.key] for answer in kept if promises_text(answer)]
    return all(same) if same else None


def promises_text(answer: Answer) -> bool:
    """Under other rules than `match` a seed repeats a text only where nothing is drawn, and nobody tells."""
    return bool((answer.told.get("speculation") or {}).get("rule") == "match")


def _ratios(slices: Sequence[Slice], plain: Sequence[Slice], closed: bool) -> list[float]:
    """Pairs of the same turn; what has no partner, as in a run that was stopped, is left out."""
    pairs = [(ours.pace(closed), theirs.pace(closed)) for ours, theirs in zip(slices, plain, strict=False)]
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]


HEAD = (
    "load",
    "speculation",
    "requests",
    "errors",
    "tokens/s",
    "first token p50 / p99, ms",
    "a token p50 / p99, ms",
    "ratio to off",
    "accepted per step",
    "same text",
)


def markdown(findings: LoadFindings) -> str:
    """A row for each load and arm."""
    lines = [HEAD, ["---"] * 2 + ["---:"] * (len(HEAD) - 2), *map(_row, findings.cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(findings: LoadFindings) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        "Ratio: tokens a second over those with speculation off, by pairs of slices (where callers come at a rate: of "
        "one text, behind its first words)."
    ]
    if all(cell.arm != ON for cell in findings.cells):
        lines.append(
            "A fixed length is a setting of the server and no request can ask for one: off and auto are compared. "
            "--fixed-url names a server that was started with --num-speculative-tokens."
        )
    for load, ratio in findings.auto_over_better.items():
        lines.append(f"{load}: auto is {ratio:.2f} of the better of the others.")
    for cell in findings.cells:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in cell.reasons.items())
        if cell.same_text is False:
            lines.append(f"NOT THE SAME TEXT as with speculation off: {cell.load}, {cell.arm}.")
        if reasons:
            lines.append(f"ERRORS, {cell.load}, {cell.arm}: {reasons}.")
    if findings.stopped is not None:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines


def _row(cell: LoadCell) -> list[str]:
    return [
        cell.load,
        cell.arm,
        str(cell.requests),
        str(cell.errors),
        f"{cell.tokens_per_second:.1f}",
        _waits(cell.first_token),
        _waits(cell.per_token),
        shown(cell.speedup, cell.speedup_interval),
        "-" if cell.accepted_per_step is None else f"{cell.accepted_per_step:.2f}",
        {True: "yes", False: "NO", None: "-"}[cell.same_text],
    ]


def _waits(times: Latency | None) -> str:
    return "- / -" if times is None else f"{1000 * times.p50:.1f} / {1000 * times.p99:.1f}"
