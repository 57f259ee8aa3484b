"""Measure the speedup of a `prediction` that is 90% right: python bench/predicted_output.py

The model's own answers, every tenth word exchanged, are the prediction; runs with and without it alternate.
"""

from __future__ import annotations

import argparse
from statistics import geometric_mean, median

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.bench.workloads import load, select

EVERY = 10


def spoilt(text: str) -> str:
    """The text with every tenth word exchanged for another."""
    words = text.split(" ")
    return " ".join("perhaps" if i % EVERY == EVERY // 2 else word for i, word in enumerate(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--quantization", default="auto")
    args = parser.parse_args()
    llm = LLM(drafter="prediction", quantization=args.quantization, quiet=True)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    ratios, per_step = [], []
    items, _ = select(load("own", tasks=("chat", "code", "summary", "story")), 1, lambda item: True)
    for item in items:
        (plain,) = llm.chat(item.messages, params, speculation=SpeculationChoice(enabled=False))
        expected = SpeculationChoice(prediction=spoilt(plain.outputs[0].text))
        pairs = []
        for _ in range(args.rounds):
            (off,) = llm.chat(item.messages, params, speculation=SpeculationChoice(enabled=False))
            (on,) = llm.chat(item.messages, params, speculation=expected)
            assert on.outputs[0].token_ids == off.outputs[0].token_ids, "the same text"
            pairs.append((off.timings.total - off.timings.first_token) / (on.timings.total - on.timings.first_token))
            per_step.append(on.speculation.accepted_per_step)
        ratios.append(median(pairs))
        print(f"{item.task}: {ratios[-1]:.2f}x plain, {per_step[-1]:.2f} tokens a step", flush=True)
    print(f"all: {geometric_mean(ratios):.2f}x plain, {sum(per_step) / len(per_step):.2f} tokens a step")


if __name__ == "__main__":
    main()
