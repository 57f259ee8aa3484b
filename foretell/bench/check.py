"""A dozen short requests to a server that runs: does speculation pay there, and if not, why."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any, Literal

from foretell.bench.compare import CompareSample, number, summarise
from foretell.bench.http_client import FAILURES, look, remedy
from foretell.bench.intervals import shown
from foretell.bench.measure import Watch
from foretell.bench.peers import SAMPLE, Asked, Endpoint, Reply
from foretell.bench.prompt import BenchPrompt
from foretell.errors import RequestError

TASKS = ("chat", "code", "extraction", "edit", "translation", "story")
MAX_TOKENS = 48
REQUESTS = 12
ON, OFF = "with guesses", "without"
SWITCHES: Mapping[str, Mapping[str, Any]] = {  # by who made the server: what a request says to get no guesses
    "foretell": {"speculative": False},
    "llamacpp": {"speculative.n_max": 0},
}
RUNNING = ("num_requests_running", "requests_processing", "num_running_reqs")
GAIN = 0.03  # nearer to 1 than this it makes no difference
SHORT, FEW = 16, 1.25  # tokens of a text, tokens a step
MANY = 4  # texts of others at once

Verdict = Literal["pays", "makes no difference", "costs time", "is off", "cannot be told"]
Row = dict[str, Any]
ROW = ("task", "arm", "tokens", "accepted_per_step", "speedup", "speedup_interval", "same_text", "tokens_per_second")
Cause = Literal["", "acceptance", "load", "length", "steps"]


@dataclass(frozen=True)
class Facts:
    """What a dozen requests showed. `others` are texts that the server writes for others meanwhile."""

    requests: int
    seconds: float
    tokens: int  # of a text, the median
    reading: float  # share of the time until the first words
    drafted: bool | None  # whether a guess was made at all; None where the server does not tell
    accepted_per_step: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    same_text: bool | None
    others: int = 0

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def verdict(self) -> Verdict:
        if self.drafted is False:
            return "is off"
        if self.speedup is None:
            return "cannot be told"
        low, high = self.speedup_interval or (self.speedup, self.speedup)
        if self.speedup >= 1 + GAIN and low > 1:
            return "pays"
        return "costs time" if self.speedup <= 1 - GAIN and high < 1 else "makes no difference"

    @property
    def cause(self) -> Cause:
        """What decides it here: of what speaks against guesses the first that holds."""
        if self.verdict == "is off":
            return ""
        if self.verdict == "pays":
            return "acceptance"
        if self.others >= MANY:
            return "load"
        if self.tokens < SHORT or self.reading > 0.5:
            return "length"
        if self.accepted_per_step is not None and self.accepted_per_step < FEW:
            return "acceptance"
        return "steps" if self.verdict != "cannot be told" else ""

    @property
    def words(self) -> str:
        """For people: one or two sentences."""
        told = "Whether speculation pays" if self.verdict == "cannot be told" else "Speculation"
        return f"{told} {self.verdict} here{self._figure()}{CAUSES[self.verdict, self.cause](self)}"

    def _figure(self) -> str:
        if self.speedup is None:
            return ""
        bounds = self.speedup_interval
        between = "" if bounds is None else f", {bounds[0]:.2f} to {bounds[1]:.2f}"
        return f" ({self.speedup:.2f} times as fast as without{between})"


def _steps(facts: Facts) -> str:
    return "some" if facts.accepted_per_step is None else f"{facts.accepted_per_step:.2f}"


_AGAINST: Mapping[Cause, Callable[[Facts], str]] = {
    "load": lambda f: (
        f": {f.others} other texts were being written, and with many at once a guess costs about as much "
        "as it saves; ask again when it is quiet."
    ),
    "length": lambda f: (
        f": texts of {f.tokens} tokens are short, and {f.reading:.0%} of the time goes by before the "
        "first word, where there is nothing to guess."
    ),
    "acceptance": lambda f: (
        f": too few guesses stand, {_steps(f)} tokens a step; another drafter may suit these "
        "prompts better (foretell bench drafters)."
    ),
    "steps": lambda f: (
        f": guesses stand, {_steps(f)} tokens a step, but steps that check them take that much longer; "
        "fewer guesses a step may pay."
    ),
}
CAUSES: Mapping[tuple[Verdict, Cause], Callable[[Facts], str]] = {
    ("pays", "acceptance"): lambda f: f": {_steps(f)} tokens come out of a step.",
    ("is off", ""): lambda f: ": no guess was made. Start the server with a drafter, such as --drafter auto.",
    ("cannot be told", ""): lambda f: (
        ": this server cannot be asked for the same without guesses."
        + ("" if f.accepted_per_step is None else f" {_steps(f)} tokens come out of a step, where 1 is plain decoding.")
    ),
    **{
        (verdict, cause): words
        for verdict in ("makes no difference", "costs time")
        for cause, words in _AGAINST.items()
    },
    **{("cannot be told", cause): words for cause, words in _AGAINST.items()},
}


@dataclass(frozen=True)
class CheckFindings:
    """All that was found, and what ended it before its time."""

    conditions: dict[str, Any]
    facts: Facts
    cells: tuple[Row, ...]  # of each task: what its prompts showed
    overall: Row
    samples: tuple[CompareSample, ...] = field(default=(), repr=False)
    reasons: dict[str, int] = field(default_factory=dict)  # of requests that failed
    stopped: BaseException | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "check",
            **self.conditions,
            "complete": self.stopped is None,
            "verdict": self.facts.verdict,
            "cause": self.facts.cause,
            "words": self.facts.words,
            "errors": sum(self.reasons.values()),
            "reasons": self.reasons,
            "requests_per_second": self.facts.requests_per_second,
            **asdict(self.facts),
            "overall": [self.overall],
            "cells": list(self.cells),
        }


def arms_of(endpoint: Endpoint) -> list[Endpoint]:
    """With guesses, and without where a request can say so."""
    switch = SWITCHES.get(endpoint.kind)
    found = [replace(endpoint, name=ON)]
    return found if switch is None else [*found, replace(endpoint, name=OFF, extra={**endpoint.extra, **switch})]


def run_check(
    endpoint: Endpoint, items: Sequence[BenchPrompt], watch: Watch, conditions: dict[str, Any]
) -> CheckFindings:
    """Ask, each prompt with and without guesses next to each other; the first request warms up."""
    arms = arms_of(endpoint)
    asked = Asked(MAX_TOKENS, 0.0)
    first = arms[0].write(items[0], asked)
    if first.error is not None:
        where = f"{endpoint.address.host}:{endpoint.address.port}"
        raise RequestError("url", f"{where} does not serve: {first.error}; {remedy(first.error)}")
    prompts = items[: REQUESTS // len(arms)]
    samples: list[CompareSample] = []
    stopped: BaseException | None = None
    others, began = running(endpoint), perf_counter()
    try:
        for place, item in enumerate(prompts):
            watch(place, len(prompts), item.task)
            for arm in arms if place % 2 else arms[::-1]:
                samples.append(CompareSample(item, 1, arm.name, arm.write(item, asked)))
        watch(len(prompts), len(prompts), "done")
    except BaseException as error:
        if not any(sample.peer == ON for sample in samples):
            raise  # there is nothing to leave
        stopped = error
    seconds = perf_counter() - began
    reasons = Counter(sample.reply.error for sample in samples if sample.reply.error is not None)
    facts, cells, overall = facts_of(samples, seconds, others)
    return CheckFindings(conditions, facts, cells, overall, tuple(samples), dict(reasons), stopped)


def facts_of(samples: Sequence[CompareSample], seconds: float, others: int) -> tuple[Facts, tuple[Row, ...], Row]:
    """What the answers show, task by task, and over all."""
    unswitched = any(each.peer == OFF and guessed(each.reply) for each in samples)
    kept = [each for each in samples if each.peer == ON or not unswitched]
    cells, overall = summarise(kept, [ON, OFF], OFF)
    ours = [each.reply for each in kept if each.peer == ON and each.reply.error is None]
    (mean,) = [cell for cell in overall if cell.arm == ON]
    told = [guessed(reply) for reply in ours if reply.steps is not None]
    facts = Facts(
        requests=len(samples),
        seconds=seconds,
        tokens=int(median(reply.tokens for reply in ours)) if ours else 0,
        reading=median((reply.first or reply.last) / reply.last for reply in ours if reply.last) if ours else 0.0,
        drafted=any(told) if told else None,
        accepted_per_step=mean.accepted_per_step,
        speedup=mean.speedup,
        speedup_interval=mean.speedup_interval,
        same_text=mean.same_text,
        others=others,
    )
    rows = [{name: asdict(cell)[name] for name in ROW} for cell in (*cells, mean) if cell.arm == ON]
    return facts, tuple(rows[:-1]), rows[-1]


def guessed(reply: Reply) -> bool:
    """Whether a guess stood; one that only fails is as good as none."""
    return reply.steps is not None and reply.steps < reply.tokens


def running(endpoint: Endpoint) -> int:
    """Texts that the server writes for others, where its metrics tell."""
    try:
        status, body = asyncio.run(look(endpoint.address, "/metrics"))
    except FAILURES:
        return 0
    text = body.decode("utf-8", "replace") if status == 200 else ""
    return int(sum(float(each["value"]) for each in SAMPLE.finditer(text) if each["name"] in RUNNING))


HEAD = ("task", "tokens", "tokens/s", "accepted per step", "ratio to none", "same text")


def markdown(findings: CheckFindings) -> str:
    """A row for each task."""
    rows = [
        [
            str(cell["task"]),
            str(cell["tokens"]),
            number(cell["tokens_per_second"], 1),
            number(cell["accepted_per_step"], 2),
            shown(cell["speedup"], cell["speedup_interval"]),
            {True: "yes", False: "NO", None: "-"}[cell["same_text"]],
        ]
        for cell in findings.cells
    ]
    lines = [HEAD, ["---"] + ["---:"] * 4 + ["---"], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(findings: CheckFindings) -> list[str]:
    """The verdict, and what a reader must know."""
    facts = findings.facts
    lines = [
        facts.words,
        f"{facts.requests} requests one after the other in {facts.seconds:.1f} s: "
        f"{facts.requests_per_second:.2f} requests a second.",
    ]
    if facts.same_text is False:
        lines.append("NOT THE SAME TEXT with guesses as without: see the table.")
    for reason, count in findings.reasons.items():
        lines.append(f"ERRORS: {reason} ({count} times).")
    if findings.stopped is not None:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines
