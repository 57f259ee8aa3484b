"""Step times by batch size, draft length and context, the input and the test of `foretell plan --calibrate`.

The target costs what 5.9 billion weights cost (`inflate.py`); drafts are known with a given acceptance rate, or come
from the model it was inflated from. Run it as `python bench/grid.py [--out FILE] [--quick]` on a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from graph_replay import step_ms
from inflate import inflate, load_base

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.engine.sequence_state import SequenceState
from foretell.kv.prefix import PrefixIndex
from foretell.models.decoder import Decoder
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Sequence

CONTEXT, PAGE, MOST = 9216, 16, 32
WRITTEN = {1: 256, 8: 96, 32: 64}  # output tokens by batch size, enough to reach the given acceptance rate
RECORDED = 256  # rows; larger steps are not one graph, and are timed as a whole only
RIGHT = 0.8
LENGTHS = (0, 1, 2, 4, 8)
DRAFTED = (2, 4)

Outputs = list[list[int]]


class Writer:
    """One way to write over the one runner; prompts stay in its cache from one writing to the next."""

    def __init__(self, runner: ModelRunner, prefix: PrefixIndex, drafter: Drafter, length: int) -> None:
        scheduler = Scheduler(runner, prefix, MOST, 4096)
        self.engine = Engine(runner, drafter, FixedController(length), scheduler)
        self.maker = RequestBuilder(
            RequestLimits(CONTEXT, frozenset(), runner.model.config.vocab), None, self.engine.drafter
        )
        self.length = length
        self.steps: list[float] = []  # milliseconds of steps in which every text took part
        self.accepted = 0.0

    def write(self, prompts: Outputs) -> Outputs:
        wanted = SamplingParams(max_tokens=WRITTEN[len(prompts)], ignore_eos=True)
        tracks = [
            self.engine.add(request)
            for i, prompt in enumerate(prompts)
            for request in self.maker.make(str(i), prompt, wanted)
        ]
        while any(track.seq.num_output_tokens == 0 for track in tracks):
            self.engine.step()
        taken = []
        while self.engine.busy:
            whole, at = all(track.seq.remaining_tokens > self.length for track in tracks), perf_counter()
            self.engine.step()
            if whole:
                taken.append(1e3 * (perf_counter() - at))
        self.steps.append(median(taken))
        self.accepted = _accepted(tracks)
        return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


def _accepted(tracks: list[SequenceState]) -> float:
    return sum(t.speculation.tokens for t in tracks) / sum(t.speculation.steps for t in tracks)


def known(drafts: Outputs) -> Drafter:
    """Return a drafter of precomputed drafts by request number: an oracle at no cost for any context."""

    def script(seq: Sequence, budget: Budget) -> Draft:
        text = drafts[int(seq.request.id)]
        return Draft.chain(text[seq.num_output_tokens : seq.num_output_tokens + budget.nodes], "oracle")

    return ScriptedDrafter(script)


def cells_of(runner: ModelRunner, draft: ModelRunner, batch: int, context: int, rounds: int) -> list[dict[str, Any]]:
    """Every length at one batch and context, arms interleaved."""
    vocab, rng = runner.model.config.vocab, random.Random(f"{batch} {context}")
    prompts = [[rng.randrange(vocab) for _ in range(context - WRITTEN[batch] // 2)] for _ in range(batch)]
    prefix = PrefixIndex(runner.pool)
    truth = Writer(runner, prefix, MixDrafter([]), 0).write(prompts)
    drafts = [[token if rng.random() < RIGHT else (token + 1) % vocab for token in text] for text in truth]
    arms: dict[tuple[str, int], Writer] = {}
    for length in LENGTHS:
        drafter = known(drafts) if length else MixDrafter([])
        arms["oracle" if length else "none", length] = Writer(runner, prefix, drafter, length)
    for length in DRAFTED if context <= 1024 else ():
        arms["model", length] = Writer(runner, prefix, GraphModelDrafter(draft, vocab, "draft"), length)
    same = {key: arm.write(prompts) == truth for key, arm in arms.items()}
    for arm in arms.values():
        arm.write(prompts)
        arm.steps.clear()
    for _ in range(rounds):
        for arm in arms.values():
            arm.write(prompts)
    prefix.clear()
    found = []
    for (drafter_name, length), arm in arms.items():
        cell = {
            "texts": batch,
            "context": context,
            "drafter": drafter_name,
            "length": length,
            "wall_ms": median(arm.steps),
            "device_ms": step_ms(runner, batch, context, length + 1) if batch * (length + 1) <= RECORDED else None,
            "accepted_per_step": arm.accepted,
            "same_text": same[drafter_name, length],
        }
        print(json.dumps(cell), flush=True)
        found.append(cell)
    return found


def sizes(model: Decoder) -> dict[str, Any]:
    """What a plan needs to know of a model, in the words of a config.json."""
    c = model.config
    return {
        "model_type": "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "max_position_embeddings": c.context,
        "tie_word_embeddings": c.tied,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="a model's name; else random weights of SmolLM2-135M's shape")
    parser.add_argument("--times", type=int, default=7, help="how often each unit of the base is there (default: 7)")
    parser.add_argument("--layers", type=int, default=32, help="of the target (default: 32)")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    base = load_base(given.base, "cuda")
    target = inflate(base, given.times, given.layers)
    runner = ModelRunner(target, 1024 + MOST * CONTEXT // PAGE, PAGE, CONTEXT)
    draft = ModelRunner(base, 4096, PAGE, CONTEXT)
    result: dict[str, Any] = {
        "bench": "grid",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "target": sizes(target),
        "draft": sizes(base),
        "dtype": "bfloat16",
        "acceptance": RIGHT,
        "draft_steps": [
            {"texts": batch, "context": 512, "device_ms": step_ms(draft, batch, 512, 1)} for batch in (1, 8, 32)
        ],
        "cells": [],
    }
    for context in (512,) if given.quick else (512, 8192):
        for batch in (1, 8, 32):
            result["cells"] += cells_of(runner, draft, batch, context, 2 if given.quick else 3)
            if given.out is not None:
                given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
