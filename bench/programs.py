"""What running programs at once gains over a loop: python bench/programs.py

The same programs with the same seeds, one after the other and by `run_batch`, on the default model with its default
drafters. Every pass has an engine of its own: the caches and learned state of one must not help the next.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from foretell import program as fp
from foretell.sampling.noise import derive_seed

TOPICS = (
    "bread", "rain", "bridges", "bees", "glass", "maps", "tea", "clocks",
    "salt", "wolves", "paper", "tides", "violins", "deserts", "soap", "trains",
)  # fmt: skip
QUESTIONS = ("What is special about", "How did people first learn of", "Name two facts about", "Why do children like")
WANTED = 3.0


@fp.function
def answer(s: fp.ProgramState, question: str, tokens: int) -> None:
    """One generation in a chat."""
    s += fp.system("You answer in plain words.") + fp.user(question)
    s += fp.assistant(fp.gen("answer", max_tokens=tokens))


@fp.function
def weigh(s: fp.ProgramState, question: str, tokens: int) -> None:
    """Two branches and a choice between them."""
    s += f"A question and two short answers.\nQuestion: {question}\n"
    forks = s.fork(2)
    forks += ["A friendly answer:", "A learned answer:"]
    forks += fp.gen("answer", max_tokens=tokens // 2)
    forks.join()
    s += f"First:{s['answer'][0]}\nSecond:{s['answer'][1]}\nThe better one is the"
    s += fp.select("better", [" first.", " second."])


@dataclass(frozen=True)
class Pass:
    """What one way to run the programs took."""

    seconds: float
    tokens: int
    forwards: int
    outputs: list[str]


def run(program: fp.Function, runs: list[dict[str, Any]], at_once: bool, args: argparse.Namespace) -> Pass:
    """One pass over all programs, on a fresh engine."""
    with fp.Engine(quiet=True, **({} if args.drafter is None else {"drafter": args.drafter})) as engine:
        options: dict[str, Any] = {"backend": engine, "temperature": args.temperature}
        program.run_batch([{"question": "Hello?", "tokens": 8}] * 4, **options)  # pages touched, threads started
        stats = engine.llm.engine.stats
        tokens, forwards, began = stats.speculation.tokens, stats.forwards, perf_counter()
        if at_once:
            states = program.run_batch(runs, **options, seed=1)
        else:
            states = [program.run(**each, **options, seed=derive_seed(1, i)) for i, each in enumerate(runs)]
        seconds = perf_counter() - began
        outputs = [state.text() for state in states]
        return Pass(seconds, stats.speculation.tokens - tokens, stats.forwards - forwards, outputs)


def compare(program: fp.Function, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turns; the ratio of a round is taken within it."""
    questions = [f"{question} {topic}?" for topic in TOPICS for question in QUESTIONS]
    runs = [{"question": questions[i % len(questions)], "tokens": args.max_tokens} for i in range(args.programs)]
    loops, batches = [], []
    for _ in range(args.rounds):
        loops.append(run(program, runs, False, args))
        batches.append(run(program, runs, True, args))
        assert loops[-1].outputs == batches[-1].outputs, "equal outputs"
    ratios = [loop.seconds / batch.seconds for loop, batch in zip(loops, batches, strict=True)]
    for name, passes in (("loop", loops), ("at once", batches)):
        seconds, forwards = (median(getattr(each, what) for each in passes) for what in ("seconds", "forwards"))
        pace = f"{passes[0].tokens / seconds:6.0f} tokens/s {forwards:6.0f} forwards"
        print(f"{program.__name__:8} {name:8} {seconds:6.1f} s {pace}")
    print(f"{program.__name__:8} ratio    {median(ratios):6.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")
    return {"ratio": median(ratios), "ratios": ratios, "loop": loops[0].seconds, "batch": batches[0].seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--only", choices=("answer", "weigh"))
    parser.add_argument("--drafter", help="instead of the default")
    args = parser.parse_args()
    programs = [program for program in (answer, weigh) if args.only in (None, program.__name__)]
    found = {program.__name__: compare(program, args) for program in programs}
    print(
        json.dumps({"programs": args.programs, "max_tokens": args.max_tokens, "temperature": args.temperature, **found})
    )
    return 0 if all(each["ratio"] >= WANTED for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
