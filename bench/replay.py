"""Record what each drafter would propose at every position of real outputs, and replay it without a model.

    python bench/replay.py FILE --record --data SPEC_BENCH --temperature 0
    python bench/replay.py FILE --record --draft DRAFT_FOLDER --temperature 0
    python bench/replay.py FILE --temperature 0 --drafters suffix,recycle,eagle
    python bench/replay.py FILE --temperature 0 --drafters suffix,recycle,model --machine 1.1b
    python bench/replay.py FILE --host-time

`--record` runs plain decoding and keeps the drafts that were not used; `--draft` records a draft model instead of the
EAGLE head. Without it a controller plays over them with the step and draft costs of a machine, so that policies can be
compared by the thousand and without noise. The synthetic 1.1B model generates what the small one does at other costs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, quantiles
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from foretell.control.adaptive import AdaptiveController  # noqa: E402
from foretell.control.controller import Controller, FreeDrafts  # noqa: E402
from foretell.sampling_params import SamplingParams  # noqa: E402
from foretell.types import Budget, Draft, DrafterTraits, Request, ScheduledSequence, Sequence  # noqa: E402
from tests.control.simulation import Machine, Scenario, SimulatedDrafter, Simulator  # noqa: E402

CHAIN = 8  # tokens of a timed drafter's draft that are recorded


@dataclass(frozen=True)
class Trace:
    """One output and the drafts of every drafter at each of its positions."""

    task: str
    prompt: int  # tokens
    tokens: tuple[int, ...]
    drafts: dict[int, dict[str, Draft]] = field(repr=False)  # by position in the sequence and drafter

    @classmethod
    def parse(cls, line: str) -> Trace:
        """Read a recorded line."""
        saved = json.loads(line)
        drafts = {
            int(at): {
                name: Draft(tuple(tokens), tuple(parents), name, confidence=confidence and tuple(confidence))
                for name, (tokens, parents, confidence) in by_name.items()
            }
            for at, by_name in saved["drafts"].items()
        }
        return cls(saved["task"], saved["prompt"], tuple(saved["tokens"]), drafts)


def load(file: Path) -> list[Trace]:
    """Read recorded traces."""
    with gzip.open(file, "rt") as lines:
        return [Trace.parse(line) for line in lines]


@dataclass(frozen=True)
class MeasuredMachine(Machine):
    """A machine whose steps were measured at some numbers of rows."""

    rows: tuple[tuple[int, float], ...] = ((1, 1.0), (2, 1.1))

    @cached_property
    def curve(self) -> tuple[float, ...]:
        return tuple(np.interp(range(600), *zip(*self.rows, strict=True)).tolist())

    def expected_seconds(self, rows: int, context: int) -> float:
        return self.curve[min(rows, 599)] + self.token * context


# smollm2-135m in int8 on two cores, with its EAGLE head: seconds of steps, of one level of a draft, of its start, and
# of a poll and a choice with the caches as a step leaves them.
CPU = MeasuredMachine(
    rows=((1, 3.01e-3), (2, 3.13e-3), (4, 3.42e-3), (8, 4.25e-3), (16, 5.66e-3), (32, 9.1e-3), (64, 15.8e-3)),
    token=1e-6,
    poll=2.5e-4,
)
# The same where a further row costs more, as in a larger model whose steps are bound by arithmetic.
STEEP = replace(CPU, rows=tuple((rows, seconds * (1 + 0.12 * (rows - 1))) for rows, seconds in CPU.rows))
# The synthetic 1.1B model of bench/peers.py in int8 on two cores, and its draft model of 135M weights.
LARGE = MeasuredMachine(
    rows=((1, 20.4e-3), (2, 20.5e-3), (4, 21.0e-3), (8, 24.1e-3), (16, 28.2e-3), (32, 47.5e-3), (64, 85.2e-3)),
    token=4e-6,
    poll=2.5e-4,
)
MACHINES = {"cpu": CPU, "steep": STEEP, "1.1b": LARGE}
HEAD = SimulatedDrafter("eagle", lambda request, at: 0.0, 1.8e-4, free=False, start=2.6e-4, node_share=0.07)
MODEL = SimulatedDrafter("model", lambda request, at: 0.0, 4.2e-3, free=False, start=7e-4, node_share=0.14)
TIMED = (HEAD, MODEL)
FREE = tuple(SimulatedDrafter(name, lambda request, at: 0.0) for name in ("suffix", "recycle"))
TRAITS = {
    "suffix": DrafterTraits(is_free=True),
    "recycle": DrafterTraits(is_free=True, prior_acceptance=0.3),
    "eagle": DrafterTraits(
        makes_trees=True, relative_cost=0.1, prior_acceptance=0.71, acceptance_by_depth=(0.71, 0.75, 0.795, 0.827)
    ),
    "model": DrafterTraits(needs_prefill=True, relative_cost=0.25, prior_acceptance=0.6),
}


class Replay(Simulator):
    """Runs a controller over traces, one request after the other or several at once."""

    def __init__(
        self,
        traces: list[Trace],
        controller: Controller,
        scenario: Scenario,
        tokens: int = 96,
        temperature: float = 0.0,
    ) -> None:
        super().__init__(replace(scenario, requests=len(traces)), controller)
        self.traces, self.most, self.temperature = traces, tokens, temperature

    def sequence(self, number: int) -> Sequence:
        trace = self.traces[number]
        params, most = SamplingParams(temperature=self.temperature), min(self.most, len(trace.tokens))
        prompt = (0,) * trace.prompt
        request = Request(str(number), prompt, params, 0, most, drafters=tuple(self.drafters))
        return Sequence(number, request, [*prompt, trace.tokens[0]], num_computed_tokens=trace.prompt)

    def output_token(self, seq: Sequence, position: int) -> int:
        trace = self.traces[seq.id]
        return trace.tokens[position - trace.prompt] if position - trace.prompt < len(trace.tokens) else -2

    def draft(self, seq: Sequence, drafter: SimulatedDrafter, length: int, least: float = 0.0) -> Draft:
        found = self.traces[seq.id].drafts.get(len(seq.tokens), {}).get(drafter.name, Draft())
        if not drafter.free and found.confidence:  # a chain ends where it is unlikely to be accepted
            chance, kept = 1.0, 0
            for confidence in found.confidence:
                chance, kept = chance * confidence, kept + 1
                if chance < least:
                    break
            found = found.truncate(kept)
        return found.truncate(length)

    def _propose(self, scheduled: ScheduledSequence) -> Draft:
        budget = scheduled.budget
        if not budget.nodes or not budget.drafter:
            return Draft()
        return self.draft(scheduled.seq, self.drafters[budget.drafter], budget.nodes, budget.min_probability)

    def _draft_seconds(self, budgets: list[Budget], drafts: list[Draft]) -> float:
        """Return the time of all drafts, whose levels run one by one until the chain ends."""
        made = [
            replace(budget, nodes=len(draft)) for budget, draft in zip(budgets, drafts, strict=True) if budget.nodes
        ]
        return super()._draft_seconds([each for each in made if not self.drafters[each.drafter].free], drafts)


class FixedChain(Controller):
    """The same drafter and length in each step, or nothing."""

    def __init__(self, drafter: str = "", length: int = 0, is_free: bool = True) -> None:
        self.drafter, self.length, self.is_free = drafter, length, is_free

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        return (seqs if self.length and self.is_free else []), self.length

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        return [Budget(min(self.length, max(0, seq.remaining_tokens - 1)), self.drafter) for seq in seqs]


@dataclass
class Outcome:
    """Seconds per token of each request."""

    seconds: list[float]

    def speedups(self, plain: Outcome) -> list[float]:
        return [one / other for one, other in zip(plain.seconds, self.seconds, strict=True)]


def play(
    traces: list[Trace], controller: Controller, names: tuple[str, ...], machine: Machine = CPU, batch: int = 1,
    temperature: float = 0.0, seed: int = 0,
) -> Outcome:  # fmt: skip
    """Return the time of each request under a controller that keeps its state, as in a server."""
    drafters = tuple(each for each in (*FREE, *TIMED) if each.name in names)
    scenario = Scenario(drafters, machine, load=lambda started: batch, seed=seed)
    replay = Replay(traces, controller, scenario, temperature=temperature)
    if isinstance(controller, AdaptiveController):
        controller.clock = controller.poll_limiter.clock = replay.poll_clock
    found = replay.run()
    return Outcome([1 / found.speeds[number] for number in range(len(traces))])


def learned(
    names: tuple[str, ...], machine: Machine, traits: Mapping[str, DrafterTraits] = TRAITS, **options: Any
) -> AdaptiveController:
    """Return a controller that knows the costs of the machine, as after the profile at start, and nothing else."""
    controller = AdaptiveController({name: traits[name] for name in names}, **options)
    for _ in range(3):
        for rows in (1, 2, 4, 8, 16):
            controller.costs.observe(rows, 128, machine.expected_seconds(rows, 128), 128 * (rows - 1))
        for drafter in [each for each in TIMED if each.name in names]:
            for depth in (1, 4):
                seconds, plain = drafter.start + drafter.seconds * depth, machine.expected_seconds(1, 0)
                controller.draft_costs[drafter.name].observe(depth, depth, 0, seconds, plain)
    return controller


def fixed_lengths(names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name in names:
        yield from ((name, length) for length in (1, 2, 3, 4, 6))


def report(traces: list[Trace], temperature: float, machine: Machine, names: tuple[str, ...], seeds: int,
           make: Callable[[], AdaptiveController]) -> dict[str, float]:  # fmt: skip
    """Compare a controller with plain decoding and with the best fixed drafter and length in hindsight."""
    one_by_one: list[float] = []
    tenth: list[float] = []
    as_server: list[float] = []
    fixed: dict[tuple[str, int], list[float]] = {}
    for seed in range(seeds):
        order = random.Random(seed).sample(traces, len(traces))
        options: dict[str, Any] = {"machine": machine, "temperature": temperature, "seed": seed}
        plain = play(order, FixedChain(), names, **options)
        as_server += play(order, make(), names, **options).speedups(plain)
        one_by_one += [
            play([trace], make(), names, **options).speedups(Outcome([plain.seconds[i]]))[0]
            for i, trace in enumerate(order)
        ]
        for i, trace in enumerate(order):  # the same request after nine others
            before = random.Random(i).sample([each for each in order if each is not trace], 9)
            times = play([*before, trace], make(), names, **options).seconds
            tenth.append(plain.seconds[i] / times[-1])
        if not seed:
            for name, length in fixed_lengths(names):
                controller = FixedChain(name, length, TRAITS[name].is_free)
                fixed[name, length] = play(order, controller, names, **options).speedups(plain)
    best = max(fixed, key=lambda key: harmonic(fixed[key]))
    return {
        "server": harmonic(as_server),
        "first": harmonic(one_by_one),
        "tenth": harmonic(tenth),
        "best_fixed": harmonic(fixed[best]),
        "best": f"{best[0]}@{best[1]}",  # type: ignore[dict-item]
        "p5": quantiles(one_by_one, n=20)[0],
        "under95": fmean(value < 0.95 for value in one_by_one),
        "least": min(one_by_one),
        "server_p5": quantiles(as_server, n=20)[0],
        "server_under95": fmean(value < 0.95 for value in as_server),
    }


def host_time(traces: list[Trace], machine: Machine, names: tuple[str, ...], batch: int) -> dict[str, float]:
    """Return the mean microseconds per step that deciding and observing take, with the caches as a loop leaves them."""
    controller, seconds = learned(names, machine), {"decide": 0.0, "observe": 0.0}
    steps = 0

    def timed(method: str, part: str) -> None:
        inner = getattr(controller, method)

        def call(*given: Any) -> Any:
            nonlocal steps
            steps += part == "observe"
            began = perf_counter()
            result = inner(*given)
            seconds[part] += perf_counter() - began
            return result

        setattr(controller, method, call)

    for method, part in (("wants_free_drafts", "decide"), ("choose_draft_lengths", "decide"), ("observe", "observe")):
        timed(method, part)
    play(traces, controller, names, machine, batch)
    return {part: round(1e6 * value / steps, 1) for part, value in seconds.items()}


def harmonic(speedups: list[float]) -> float:
    """Return the speedup of requests that each take one plain second."""
    return len(speedups) / sum(1 / value for value in speedups)


class Recorder(Controller):
    """Asks every drafter in each step, keeps the drafts and uses none."""

    allows_early_start = False

    def __init__(self, timed: str) -> None:
        self.timed, self.drafts = timed, dict[str, dict[int, dict[str, Draft]]]()

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        return [seq for seq in seqs if seq.is_decoding], 16

    def choose_draft_lengths(self, seqs: list[Sequence], free_drafts: FreeDrafts) -> list[Budget]:
        for seq in seqs:
            found = dict(free_drafts.get(seq.id, {}))
            self.drafts.setdefault(seq.request.id, {})[len(seq.tokens)] = found
        lengths = [min(CHAIN, seq.remaining_tokens - 1) if seq.is_decoding else 0 for seq in seqs]
        return [Budget(max(0, length), self.timed) for length in lengths]

    def trim(self, scheduled: list[ScheduledSequence], drafts: list[Draft]) -> list[Draft]:
        for each, draft in zip(scheduled, drafts, strict=True):
            if len(draft):
                self.drafts[each.seq.request.id][len(each.seq.tokens)][self.timed] = draft
        return [Draft()] * len(drafts)


def record(file: Path, data: Path | None, temperature: float, draft: str | None, per_task: int) -> None:
    """Write the traces of a workload, so many prompts of each task."""
    from foretell import LLM
    from foretell.bench.workloads import load as workload

    drafter = "auto" if draft is None else f"suffix,recycle,model:{draft}"
    llm = LLM("smollm2-135m", drafter=drafter, quiet=True)
    (timed,) = [name for name, each in llm.engine.drafter.drafters.items() if not each.traits.is_free]
    recorder = llm.engine.controller = Recorder(timed)
    seen: dict[str, int] = {}
    with gzip.open(file, "wt") as lines:
        for number, item in enumerate(workload("own" if data is None else "spec-bench", data)):
            seen[item.task] = seen.get(item.task, 0) + 1
            if seen[item.task] > per_task:
                continue
            recorder.drafts.clear()
            params = SamplingParams(temperature=temperature, max_tokens=128, seed=number)
            (output,) = llm.chat([list(item.messages)], params)
            (drafts,) = recorder.drafts.values()
            saved = {
                at: {name.partition(":")[0]: [d.tokens, d.parents, d.confidence] for name, d in by_name.items()}
                for at, by_name in drafts.items()
            }
            tokens, prompt = list(output.outputs[0].token_ids), len(output.prompt_token_ids)
            line = {"task": item.task, "prompt": prompt, "tokens": tokens, "drafts": saved}
            print(json.dumps(line), file=lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--record", action="store_true", help="write the file instead of playing it")
    parser.add_argument("--data", type=Path, help="the folder of Spec-Bench, to record it instead of the own prompts")
    parser.add_argument("--draft", help="the folder of a draft model, to record it instead of the EAGLE head")
    parser.add_argument("--per-task", type=int, default=8, help="prompts of each task that are recorded")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--machine", choices=MACHINES, default="cpu")
    parser.add_argument("--drafters", default="suffix,recycle,eagle")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--host-time", action="store_true", help="measure what deciding costs at batch 1, 4 and 16")
    args = parser.parse_args()
    names, machine = tuple(args.drafters.split(",")), MACHINES[args.machine]
    for file in args.files if args.record else ():
        record(file, args.data, args.temperature, args.draft, args.per_task)
    for batch in (1, 4, 16) if args.host_time else ():
        traces = [trace for file in args.files for trace in load(file)]
        print(args.drafters, batch, json.dumps(host_time(traces, machine, names, batch)), flush=True)
    for file in () if args.record or args.host_time else args.files:
        found = report(load(file), args.temperature, machine, names, args.seeds, lambda: learned(names, machine))
        print(
            file.name,
            args.machine,
            args.drafters,
            json.dumps({key: value if isinstance(value, str) else round(value, 3) for key, value in found.items()}),
            flush=True,
        )


if __name__ == "__main__":
    main()
