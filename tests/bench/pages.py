"""Findings to be shown: what each bench makes of times that are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretell.bench.check import OFF, ON, CheckResult, facts_of
from foretell.bench.compare import CompareResult, CompareSample, summarize
from foretell.bench.http_client import ClosedLoop, Level, Poisson, StreamResult
from foretell.bench.load import LoadResult, LoadSlice, cell_of
from foretell.bench.never_slower import ALL, NeverSlowerCell, NeverSlowerOverall, NeverSlowerResult
from foretell.bench.peers import PeerReply
from foretell.bench.prompt import BenchPrompt
from foretell.bench.synthetic import MODES, SyntheticCell, SyntheticResult

FACTS: dict[str, Any] = {
    "model": "smollm2-135m",
    "version": "0.1.0",
    "machine": {"device": "a processor with a long name, as they have", "cores": 2},
}


def _samples(peers: dict[str, float], text: str) -> list[CompareSample]:
    return [
        CompareSample(
            BenchPrompt(f"{task} {i}", task, ({"role": "user", "content": text},)),
            number,
            name,
            PeerReply(
                f"{text} {i}",
                41,
                0.1 + 0.01 * i,
                0.1 + 0.01 * i + 40 * seconds * (1 + 0.1 * number),
                41.0 if name == OFF else 20.0,
            ),
        )
        for task in ("code", "chat", "translation")
        for i in range(2)
        for number in (1, 2, 3)
        for name, seconds in peers.items()
    ]


def compared(text: str) -> CompareResult:
    samples = _samples({"llama.cpp Q8_0 n-gram": 0.01, "foretell:plain": 0.008, "foretell": 0.004}, text)
    cells, overall = summarize(samples, list(dict.fromkeys(each.peer for each in samples)), "foretell:plain")
    return CompareResult(FACTS, "foretell:plain", cells, overall, tuple(samples))


def checked(text: str) -> CheckResult:
    samples = _samples({ON: 0.004, OFF: 0.008}, text)
    return CheckResult(FACTS, *facts_of(samples, 12.0, 3), tuple(samples))


def loaded() -> LoadResult:
    def slices(seconds: float) -> list[LoadSlice]:
        answers = [
            [StreamResult(40, 0.1 + 0.02 * i, 1 + seconds * 40 * (1 + i / 20)) for i in range(20)] for _ in range(3)
        ]
        return [LoadSlice(each, 10 * seconds) for each in answers]

    levels: list[Level] = [ClosedLoop(1), ClosedLoop(64), Poisson(2.5)]
    variants = {"off": 0.02, "auto": 0.01, "on": 0.012}
    cells = [
        cell_of(level, variant, slices(pace), slices(variants["off"]))
        for level in levels
        for variant, pace in variants.items()
    ]
    return LoadResult(FACTS, tuple(cells))


def set_at_a_rate() -> SyntheticResult:
    cell = SyntheticCell(0.8, 4, "sequence", 1, 90, 3.35, 3.36, 0.003, 2.5, (2.3, 2.7), 400.0, 160.0, True)
    cells = [
        replace(cell, rate=rate, mode=mode, batch=batch, speedup=2.5 / batch**0.3)
        for rate in (0.5, 0.8)
        for batch in (1, 8, 32)
        for mode in MODES
    ]
    return SyntheticResult(FACTS, tuple(cells))


def held_to_a_bar() -> NeverSlowerResult:
    cell = NeverSlowerCell(
        task="code", temperature=0.0, batch=1, drafter="ngram", sequences=8, rounds=4, tokens=400,
        accepted_per_step=2.1, speedup=1.4, speedup_interval=(1.3, 1.5), noise=0.02,
        fixed={0: 1.0, 2: 1.2, 8: 0.7}, best_fixed=2,
        best_fixed_speedup=1.2, bar=1.16, verdict="held", tokens_per_second=200.0, plain_tokens_per_second=150.0,
        same_text=True, differing=(), drafter_failures=0,
    )  # fmt: skip
    slow = replace(
        cell, task="chat", drafter="model:smollm2-135m", speedup=0.8, speedup_interval=None, verdict="slower"
    )
    overall = NeverSlowerOverall(ALL, 3, 2.0, 1.1, (1.0, 1.2), "slower", True)
    return NeverSlowerResult(FACTS, (cell, replace(cell, batch=32, verdict="inconclusive"), slow), (overall,))
