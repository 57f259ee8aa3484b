"""`bench check`: a dozen short requests to a running server that show whether speculation pays there, and why not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any, Literal

from foretell.errors import RequestError
from foretell.utils.report_table import ReportTable

from .compare import CompareSample, number, summarize
from .http_client import FAILURES, get_page, suggestion
from .intervals import INTERVAL, compared
from .measure import ProgressCallback
from .metrics import as_row, json_name
from .peers import METRIC_LINE, Endpoint, PeerReply
from .prompt import BenchPrompt, RequestParams

TASKS = ("chat", "code", "extraction", "edit", "translation", "story")
MAX_TOKENS = 48
REQUESTS = 12
ON, OFF = "with speculation", "without"
SWITCHES: Mapping[str, Mapping[str, Any]] = {  # fields of a request that turn speculation off, by server
    "foretell": {"speculative": False},
    "llamacpp": {"speculative.n_max": 0},
}
RUNNING = (  # metrics of the running requests
    "num_requests_running",
    "requests_processing",
    "num_running_reqs",
)
MIN_GAIN = 0.03  # smallest speedup, as a difference from 1, that counts
SHORT = 16  # output tokens; fewer are a short output
FEW = 1.25  # tokens per step; fewer are low acceptance
BUSY = 4  # concurrent requests of other clients

# Values of `verdict` in the JSON.
CheckVerdict = Literal["pays", "makes no difference", "costs time", "is off", "cannot be told"]
UNKNOWN: CheckVerdict = "cannot be told"
CellRow = dict[str, Any]
ROW_FIELDS = (
    "task",
    "arm",
    "tokens",
    "accepted_per_step",
    "speedup",
    "speedup_interval",
    "same_text",
    "tokens_per_second",
)
Cause = Literal["", "acceptance", "load", "length", "steps"]


@dataclass(frozen=True)
class CheckFacts:
    """Measurements of a dozen requests. `other_requests` are those of other clients that run meanwhile."""

    requests: int
    seconds: float
    tokens: int  # median output length
    first_token_share: float = field(metadata=json_name("reading"))  # fraction of the time until the first token
    drafted: bool | None  # whether any draft token was accepted; None if the server does not report it
    accepted_per_step: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    same_text: bool | None
    other_requests: int = field(default=0, metadata=json_name("others"))

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds

    @property
    def verdict(self) -> CheckVerdict:
        if self.drafted is False:
            return "is off"
        if self.speedup is None:
            return UNKNOWN
        low, high = self.speedup_interval or (self.speedup, self.speedup)
        if self.speedup >= 1 + MIN_GAIN and low > 1:
            return "pays"
        return "costs time" if self.speedup <= 1 - MIN_GAIN and high < 1 else "makes no difference"

    @property
    def cause(self) -> Cause:
        """Return the first cause that applies, or why speculation pays."""
        if self.verdict == "is off":
            return ""
        if self.verdict == "pays":
            return "acceptance"
        if self.other_requests >= BUSY:
            return "load"
        if self.tokens < SHORT or self.first_token_share > 0.5:
            return "length"
        if self.accepted_per_step is not None and self.accepted_per_step < FEW:
            return "acceptance"
        return "steps" if self.verdict != UNKNOWN else ""

    @property
    def message(self) -> str:
        """Return the verdict with its cause in one or two sentences."""
        subject = "Whether speculation pays" if self.verdict == UNKNOWN else "Speculation"
        verdict = "cannot be determined" if self.verdict == UNKNOWN else self.verdict
        return f"{subject} {verdict} here{self._figure()}{CAUSES[self.verdict, self.cause](self)}"

    def _figure(self) -> str:
        if self.speedup is None:
            return ""
        bounds = self.speedup_interval
        between = "" if bounds is None else f", {bounds[0]:.2f} to {bounds[1]:.2f}"
        return f" (speedup {self.speedup:.2f}{between})"


def _steps(facts: CheckFacts) -> str:
    return "some" if facts.accepted_per_step is None else f"{facts.accepted_per_step:.2f}"


_CAUSES_AGAINST: Mapping[Cause, Callable[[CheckFacts], str]] = {
    "load": lambda f: (
        f": {f.other_requests} other requests were running, and at a high batch size a draft token costs about as "
        "much as it saves; run again at low load."
    ),
    "length": lambda f: (
        f": outputs of {f.tokens} tokens are short, and {f.first_token_share:.0%} of the time is spent before the "
        "first token, where speculation does not help."
    ),
    "acceptance": lambda f: (
        f": too few draft tokens are accepted, {_steps(f)} tokens per step; another drafter may suit these "
        "prompts better (foretell bench drafters)."
    ),
    "steps": lambda f: (
        f": draft tokens are accepted, {_steps(f)} tokens per step, but verification makes steps that much "
        "longer; shorter drafts may pay."
    ),
}
CAUSES: Mapping[tuple[CheckVerdict, Cause], Callable[[CheckFacts], str]] = {
    ("pays", "acceptance"): lambda f: f": {_steps(f)} tokens per step.",
    ("is off", ""): lambda f: ": no draft token was accepted. Start the server with a drafter, such as --drafter auto.",
    (UNKNOWN, ""): lambda f: (
        ": this server cannot turn speculation off for a request."
        + (
            ""
            if f.accepted_per_step is None
            else f" It generates {_steps(f)} tokens per step, where 1 is plain decoding."
        )
    ),
    **{
        (verdict, cause): message
        for verdict in ("makes no difference", "costs time")
        for cause, message in _CAUSES_AGAINST.items()
    },
    **{(UNKNOWN, cause): message for cause, message in _CAUSES_AGAINST.items()},
}


@dataclass(frozen=True)
class CheckResult:
    """The result of a check, and the exception that stopped it early."""

    conditions: dict[str, Any]
    facts: CheckFacts
    cells: tuple[CellRow, ...]  # by task
    overall: CellRow
    samples: tuple[CompareSample, ...] = field(default=(), repr=False)
    reasons: dict[str, int] = field(default_factory=dict)  # errors of failed requests, with counts
    stopped: BaseException | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "check",
            **self.conditions,
            "complete": self.stopped is None,
            "verdict": self.facts.verdict,
            "cause": self.facts.cause,
            "words": self.facts.message,
            "errors": sum(self.reasons.values()),
            "reasons": self.reasons,
            "requests_per_second": self.facts.requests_per_second,
            **as_row(self.facts),
            "overall": [self.overall],
            "cells": list(self.cells),
        }


def variants_of(endpoint: Endpoint) -> list[Endpoint]:
    """Return the endpoint with speculation, and without it if a request can turn it off."""
    switch = SWITCHES.get(endpoint.kind)
    found = [replace(endpoint, name=ON)]
    return found if switch is None else [*found, replace(endpoint, name=OFF, extra={**endpoint.extra, **switch})]


def run_check(
    endpoint: Endpoint, items: Sequence[BenchPrompt], progress: ProgressCallback, conditions: dict[str, Any]
) -> CheckResult:
    """Send each prompt with and without speculation next to each other; the first request is warm-up."""
    variants = variants_of(endpoint)
    params = RequestParams(MAX_TOKENS, 0.0)
    first = variants[0].generate(items[0], params)
    if first.error is not None:
        where = f"{endpoint.address.host}:{endpoint.address.port}"
        raise RequestError("url", f"{where} does not serve: {first.error}; {suggestion(first.error)}")
    prompts = items[: REQUESTS // len(variants)]
    samples: list[CompareSample] = []
    stopped: BaseException | None = None
    others, began = running_requests(endpoint), perf_counter()
    try:
        for index, item in enumerate(prompts):
            progress(index, len(prompts), item.task)
            for variant in variants if index % 2 else variants[::-1]:
                samples.append(CompareSample(item, 1, variant.name, variant.generate(item, params)))
        progress(len(prompts), len(prompts), "done")
    except BaseException as error:
        if not any(sample.peer == ON for sample in samples):
            raise  # nothing was finished
        stopped = error
    seconds = perf_counter() - began
    reasons = Counter(sample.reply.error for sample in samples if sample.reply.error is not None)
    facts, cells, overall = facts_of(samples, seconds, others)
    return CheckResult(conditions, facts, cells, overall, tuple(samples), dict(reasons), stopped)


def facts_of(
    samples: Sequence[CompareSample], seconds: float, others: int
) -> tuple[CheckFacts, tuple[CellRow, ...], CellRow]:
    """Summarize the replies by task and over all."""
    still_speculates = any(each.peer == OFF and has_accepted(each.reply) for each in samples)
    kept = [each for each in samples if each.peer == ON or not still_speculates]
    cells, overall = summarize(kept, [ON, OFF], OFF)
    replies = [each.reply for each in kept if each.peer == ON and each.reply.error is None]
    (mean,) = [cell for cell in overall if cell.peer == ON]
    accepted = [has_accepted(reply) for reply in replies if reply.steps is not None]
    facts = CheckFacts(
        requests=len(samples),
        seconds=seconds,
        tokens=int(median(reply.tokens for reply in replies)) if replies else 0,
        first_token_share=median((reply.first or reply.last) / reply.last for reply in replies if reply.last)
        if replies
        else 0.0,
        drafted=any(accepted) if accepted else None,
        accepted_per_step=mean.accepted_per_step,
        speedup=mean.speedup,
        speedup_interval=mean.speedup_interval,
        same_text=mean.same_text,
        other_requests=others,
    )
    rows = [{name: as_row(cell)[name] for name in ROW_FIELDS} for cell in (*cells, mean) if cell.peer == ON]
    return facts, tuple(rows[:-1]), rows[-1]


def has_accepted(reply: PeerReply) -> bool:
    """Return whether a draft token was accepted, which fewer steps than tokens show."""
    return reply.steps is not None and reply.steps < reply.tokens


def running_requests(endpoint: Endpoint) -> int:
    """Return the running requests of the server, 0 if it has no metrics."""
    try:
        status, body = asyncio.run(get_page(endpoint.address, "/metrics"))
    except FAILURES:
        return 0
    text = body.decode("utf-8", "replace") if status == 200 else ""
    return int(sum(float(each["value"]) for each in METRIC_LINE.finditer(text) if each["name"] in RUNNING))


HEAD = ("task", "tokens", "tokens/s", "accepted per step", "speedup", INTERVAL, "same text")


def report_table(result: CheckResult) -> ReportTable:
    """Return a table with a row for each task."""
    rows = [
        [
            str(cell["task"]),
            str(cell["tokens"]),
            number(cell["tokens_per_second"], 1),
            number(cell["accepted_per_step"], 2),
            *compared(cell["speedup"], cell["speedup_interval"]),
            {True: "yes", False: "NO", None: "-"}[cell["same_text"]],
        ]
        for cell in result.cells
    ]
    return ReportTable(HEAD, rows)


def remarks(result: CheckResult) -> list[str]:
    """Return the verdict and the notes below the table."""
    facts = result.facts
    lines = [
        facts.message,
        f"{facts.requests} requests one after the other in {facts.seconds:.1f} s: "
        f"{facts.requests_per_second:.2f} requests per second.",
    ]
    if facts.same_text is False:
        lines.append("NOT THE SAME TEXT with speculation as without: see the table.")
    for reason, count in result.reasons.items():
        lines.append(f"ERRORS: {reason} ({count} times).")
    if result.stopped is not None:
        lines.append("Stopped early: the table has the finished part. Run the command again for all of it.")
    return lines
