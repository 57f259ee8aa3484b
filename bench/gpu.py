"""Speed on a CUDA device: steps by rows and context, host time, oracle and n-gram drafts, a draft model, first token.

The target costs what 5.9 billion weights cost and says what the small base model says (`inflate.py`).
Run it as `python bench/gpu.py [--base smollm2-135m] [--quick]`. One table comes last, with what was asked for.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import harmonic_mean, median
from time import perf_counter
from typing import Any

import torch
from graph_replay import chain_ms, step_ms
from inflate import inflate, load_base

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import OracleDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.kernels.quant import QuantFormat
from foretell.models.decoder import Decoder
from foretell.models.quantize import quantize_weights_cuda
from foretell.runner.cuda.graphs import capture_now
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams

CONTEXT, PAGE = 9216, 16
PROMPT, WRITTEN = 448, 128  # tokens: about 512 in the middle of a text
NGRAMS, PASSAGES = "n-gram, repeating text", 8  # passages that are copied; a single one might not be gone on with
SAMPLED: dict[str, dict[str, object]] = {
    "T=1": {"temperature": 1.0},
    "T=1 top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T=1 top-k 50": {"temperature": 1.0, "top_k": 50},
}
ROUNDINGS: dict[QuantFormat, str] = {"int8": "<= 2.9", "fp8": "<= 2.6"}


@dataclass
class Figures:
    """What was measured, printed as it comes and kept for the end."""

    values: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    last: str = ""  # the figure that indented ones belong to

    def note(self, name: str, value: float, unit: str = "", goal: str = "") -> None:
        self.values[name] = value
        met = "" if not goal else "yes" if reaches(value, goal) else "no"
        self.last = name if not name.startswith(" ") else self.last
        whole = name if name is self.last else f"{self.last.split(': ')[0]}: {name.strip()}"
        self.lines.append(f"| {whole} | {value:.4g} {unit} | {goal} | {met} |")
        print(f"{name:48} {value:10.3f} {unit:10} {goal}", flush=True)

    def table(self) -> str:
        return "\n".join(["| | measured | asked | met |", "|---|---|---|---|", *self.lines])


def reaches(value: float, goal: str) -> bool:
    """Whether a figure is what a goal such as `<= 3.5` asks for."""
    sign, number = goal.split()
    return value >= float(number) if sign == ">=" else value <= float(number)


class Arm:
    """One way to write: an engine of its own over the one runner, and what it took."""

    def __init__(self, runner: ModelRunner, drafter: Drafter | None, nodes: int, most: int) -> None:
        self.runner = runner
        scheduler = Scheduler(runner, None, most, 4096)
        self.engine = Engine(runner, drafter or MixDrafter([]), FixedController(nodes), scheduler)
        self.maker = RequestBuilder(
            RequestLimits(CONTEXT, frozenset(), runner.model.config.vocab), None, self.engine.drafter
        )
        self.rates: list[float] = []  # tokens a second
        self.steps: list[float] = []  # milliseconds, each
        self.accepted = 0.0

    def write(self, prompts: list[list[int]], tokens: int, **params: object) -> list[list[int]]:
        """Write after each prompt; the clock runs once all prompts are read."""
        wanted = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
        tracks = [
            self.engine.add(replace(request, seed=i))
            for i, prompt in enumerate(prompts)
            for request in self.maker.make(str(i), prompt, wanted)
        ]
        while any(track.seq.num_output_tokens == 0 for track in tracks):
            self.engine.step()
        before, steps = sum(track.seq.num_output_tokens for track in tracks), []
        began = perf_counter()
        while self.engine.busy:
            at = perf_counter()
            self.engine.step()
            steps.append(1e3 * (perf_counter() - at))
        self.rates.append((sum(track.seq.num_output_tokens for track in tracks) - before) / (perf_counter() - began))
        self.steps.append(median(steps))
        self.accepted = sum(t.speculation.tokens for t in tracks) / sum(t.speculation.steps for t in tracks)
        return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


def prompts_of(count: int, vocab: int, copied: bool = False) -> list[list[int]]:
    """Tokens without sense; `copied`: passages that come again and again."""
    rng = random.Random(count)
    if not copied:
        return [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(count)]
    passages = [[rng.randrange(vocab) for _ in range(40)] for _ in range(count)]
    return [(passage * (PROMPT // 40 + 1))[:PROMPT] for passage in passages]


def rows_and_context(runner: ModelRunner, figures: Figures) -> None:
    """Time a step on the device by rows of one sequence and by sequences."""
    for start in (512, 8192):
        one = step_ms(runner, 1, start, 1)
        figures.note(f"step, 1 row, context {start}", one, "ms", "<= 3.5" if start == 512 else "")
        for rows, goal in ((5, ""), (8, "<= 1.06"), (16, ""), (32, ""), (64, "<= 1.15")):
            # In turn: the device takes 2 to 3% longer for the same graph when it has run for a while.
            ratio = median(step_ms(runner, 1, start, rows) / step_ms(runner, 1, start, 1) for _ in range(3))
            figures.note(f"  {rows} rows over one", ratio, "x", goal if start == 512 else "")
    for sequences in (8, 32):
        figures.note(f"step, {sequences} sequences, context 512", step_ms(runner, sequences, 512, 1), "ms")
        figures.note(f"step, {sequences} sequences of 5 rows", step_ms(runner, sequences, 512, 5), "ms")


def plain_and_oracle(runner: ModelRunner, figures: Figures, rounds: int) -> None:
    """Time the engine loop: the host time beyond the device's work, and the speedup of known drafts."""
    vocab = runner.model.config.vocab
    for batch, gain, host in ((1, ">= 2.2", "<= 0.4"), (8, ">= 1.8", ""), (32, ">= 1.3", "<= 1.5")):
        prompts = prompts_of(batch, vocab)
        plain = Arm(runner, None, 0, batch)
        truth = plain.write(prompts, WRITTEN)
        outputs = {tuple(prompt): text for prompt, text in zip(prompts, truth, strict=True)}
        speculative = Arm(runner, OracleDrafter(outputs, vocab, 0.2), 4, batch)
        same = speculative.write(prompts, WRITTEN)
        for arm in (plain, speculative):
            arm.rates.clear()
            arm.steps.clear()
        for _ in range(rounds):
            plain.write(prompts, WRITTEN)
            speculative.write(prompts, WRITTEN)
        device = step_ms(runner, batch, 512, 1)
        figures.note(f"plain, batch {batch}: wall a step", median(plain.steps), "ms", "<= 3.8" if batch == 1 else "")
        figures.note("  beyond the device's work", median(plain.steps) - device, "ms", host)
        figures.note("  tokens a second", median(plain.rates), "")
        figures.note("  oracle (0.8, 4 tokens) over plain", median(speculative.rates) / median(plain.rates), "x", gain)
        figures.note("    accepted per step", speculative.accepted)
        figures.note("    wall a step", median(speculative.steps), "ms")
        figures.note(
            "    beyond the device's work", median(speculative.steps) - step_ms(runner, batch, 512, 5), "ms", host
        )
        agree = sum(a == b for a, b in zip(truth, same, strict=True)) / batch
        figures.note("    equal outputs", agree)


def by_turns(arms: tuple[Arm, Arm], prompts: list[list[int]], tokens: int, rounds: int) -> tuple[float, float]:
    """Tokens a second of each, after a first time that is not counted."""
    for arm in arms:
        arm.write(prompts, tokens)
        arm.rates.clear()
        arm.steps.clear()
    for _ in range(rounds):
        for arm in arms:
            arm.write(prompts, tokens)
    return median(arms[0].rates), median(arms[1].rates)


def passages(runner: ModelRunner, figures: Figures, rounds: int) -> None:
    """N-grams where text repeats, one text at a time: whether a model goes on with what it read differs by passage.

    As many tokens are generated after each, so the harmonic mean of the rates is all tokens over all seconds.
    """
    vocab = runner.model.config.vocab
    arms = (Arm(runner, None, 0, 1), Arm(runner, NGramDrafter(2, 4), 8, 1))
    rates, accepted, walls = [], [], []
    for prompt in prompts_of(PASSAGES, vocab, copied=True):
        rates.append(by_turns(arms, [prompt], WRITTEN // 2, rounds))
        accepted.append(arms[1].accepted)
        walls.append(median(arms[1].steps))
    plain, speculative = zip(*rates, strict=True)
    ratios = [mine / its for its, mine in rates]
    figures.note(f"{NGRAMS}, batch 1: over plain", harmonic_mean(speculative) / harmonic_mean(plain), "x", ">= 1.5")
    figures.note(f"  the fewest of {PASSAGES} passages", min(ratios), "x")
    figures.note(f"  the most of {PASSAGES} passages", max(ratios), "x")
    figures.note("  accepted per step", harmonic_mean(accepted))
    figures.note("  wall a step", median(walls), "ms")


def drafts(runner: ModelRunner, draft: ModelRunner, figures: Figures, rounds: int) -> None:
    """N-grams where text repeats, and a draft model."""
    vocab = runner.model.config.vocab
    figures.note("draft model, step, 1 row", step_ms(draft, 1, 512, 1), "ms", "<= 0.8")
    passages(runner, figures, rounds)
    makers: dict[str, tuple[Callable[[], Drafter], int, tuple[int, ...]]] = {
        NGRAMS: (lambda: NGramDrafter(2, 4), 8, (PASSAGES,)),
        "draft model": (lambda: GraphModelDrafter(draft, vocab, "draft"), 4, (1, 8)),
    }
    for name, (make, nodes, batches) in makers.items():
        for batch in batches:
            arms = (Arm(runner, None, 0, batch), Arm(runner, make(), nodes, batch))
            plain, speculative = by_turns(arms, prompts_of(batch, vocab, name == NGRAMS), WRITTEN, rounds)
            figures.note(f"{name}, batch {batch}: over plain", speculative / plain, "x")
            figures.note("  accepted per step", arms[1].accepted)
            figures.note("  wall a step", median(arms[1].steps), "ms")
            if name == "draft model" and batch == 1:
                a_round(runner, draft, nodes, median(arms[1].steps), figures)


def a_round(runner: ModelRunner, draft: ModelRunner, nodes: int, wall: float, figures: Figures) -> None:
    """Time a step with a draft model and its parts, on the device and on the host."""
    step, check = step_ms(draft, 1, 512, 1), step_ms(runner, 1, 512, nodes + 1)
    chain = chain_ms(draft, 512, nodes, runner.model.config.vocab)
    figures.note(f"  a round over {nodes} draft steps and a check", wall / (nodes * step + check), "x", "<= 1.12")
    figures.note(f"    its {nodes} draft steps as one graph over as many", chain / (nodes * step), "x")
    figures.note("    beyond the device's work", wall - chain - check, "ms")


def sampled(runner: ModelRunner, figures: Figures, rounds: int) -> None:
    """Time plain decoding with sampling on the device."""
    for batch in (1, 32):
        prompts = prompts_of(batch, runner.model.config.vocab)
        for name, asked in SAMPLED.items():
            arm = Arm(runner, None, 0, batch)
            arm.write(prompts, WRITTEN // 4, **asked)
            arm.steps.clear()
            for _ in range(rounds):
                arm.write(prompts, WRITTEN // 2, **asked)
            figures.note(f"sampled, {name}, batch {batch}: wall a step", median(arm.steps), "ms")


def eight_bits(base: Decoder, figures: Figures, rounds: int) -> None:
    """The target with its weights in 8 bits."""
    for rounding, goal in ROUNDINGS.items():
        began = perf_counter()
        runner = ModelRunner(quantize_weights_cuda(inflate(base), rounding), 4096, PAGE, CONTEXT)
        figures.note(f"{rounding}: made in", perf_counter() - began, "s")
        one = step_ms(runner, 1, 512, 1)
        figures.note(f"{rounding}: step, 1 row", one, "ms")
        figures.note(f"{rounding}: step, 8 rows", step_ms(runner, 1, 512, 8), "ms", goal)
        figures.note(f"{rounding}: 64 rows over one", step_ms(runner, 1, 512, 64) / one, "x")
        arm = Arm(runner, None, 0, 1)
        for _ in range(rounds):
            arm.write(prompts_of(1, base.config.vocab), WRITTEN // 2)
        figures.note(f"{rounding}: plain, batch 1: wall a step", median(arm.steps[1:]), "ms")
        del runner, arm
        torch.cuda.empty_cache()


def first_token(runner: ModelRunner, figures: Figures, rounds: int) -> None:
    """A prompt of 2048 tokens until its first token."""
    vocab, seconds = runner.model.config.vocab, []
    for i in range(rounds + 2):
        rng = random.Random(i)
        arm = Arm(runner, None, 0, 1)
        (request,) = arm.maker.make("0", [rng.randrange(vocab) for _ in range(2048)], SamplingParams(max_tokens=1))
        track = arm.engine.add(request)
        began = perf_counter()
        while track.seq.num_output_tokens == 0:
            arm.engine.step()
        seconds.append(perf_counter() - began)
    figures.note("first token of a prompt of 2048", 1e3 * median(seconds[2:]), "ms")


def costs(model: Decoder, figures: Figures) -> None:
    """The fewest bytes and operations of a step, and what the device copies in a second."""
    weights = sum(p.numel() for name, p in model.named_parameters() if name != "embed")
    c = model.config
    token = 2 * c.layers * c.kv_heads * c.head_dim * 2
    figures.note("weights a step reads", 2 * weights / 1e9, "GB")
    figures.note("operations a row", 2 * weights / 1e9, "GFLOP")
    figures.note("cache a step reads a text, context 512", 512 * token / 1e9, "GB")
    a = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    b = torch.empty_like(a)
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
    b.copy_(a)
    begin.record()
    for _ in range(5):
        b.copy_(a)
    end.record()
    torch.cuda.synchronize()
    rate = 5 * 2 * a.nbytes / (begin.elapsed_time(end) / 1e3) / 1e12
    figures.note("copy, read and written", rate, "TB/s")
    figures.note("floor of a step by its bytes", (2 * weights + 512 * token) / rate / 1e9, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="a model's name; else random weights of SmolLM2-135M's shape")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    rounds = 2 if given.quick else 5
    base = load_base(given.base, "cuda")
    target = inflate(base)
    figures = Figures({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "base": given.base})
    costs(target, figures)
    runner = ModelRunner(target, 4096, PAGE, CONTEXT)
    draft = ModelRunner(base, 4096, PAGE, CONTEXT)
    with capture_now():  # what a size costs in the end, whatever would have served for it
        rows_and_context(runner, figures)
        plain_and_oracle(runner, figures, rounds)
        drafts(runner, draft, figures, rounds)
        sampled(runner, figures, rounds)
        first_token(runner, figures, rounds)
        del runner, draft, target
        torch.cuda.empty_cache()
        eight_bits(base, figures, rounds)
    print(figures.table())
    print(json.dumps(figures.values))


if __name__ == "__main__":
    main()
