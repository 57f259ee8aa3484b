"""Equality of tensor-parallel outputs with those of one process: python bench/parallel.py --ranks 2 --out FILE

Prompts are completed plain and with several drafters, in batches, with preempted and with aborted sequences; outputs
with each drafter must equal the plain ones. `--against FILE` compares them with another run, of one rank: where two
differ, the scores show whether it is a near-tie. `--first` and `--prompts` select a part to keep a run short.
`--drafter eagle` runs that drafter alone and reports its tokens per step and the head's memory on each rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.bench.workloads import load
from foretell.certify.text_equality import NEAR_TIE, scores_after
from foretell.control.controller import FixedController
from foretell.draft.base import Drafter
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.engine import Engine
from foretell.engine.stats import SpeculationStats
from foretell.models.config import ModelConfig
from foretell.models.draft_heads import EagleConfig, LayerConfig, make_head, write_head
from foretell.tensor_parallel import head_bytes, weight_bytes
from foretell.types import Budget, Draft, Sequence

BEGINNING = 24  # tokens of a prompt
NODES = 4
TokenLists = list[list[int]]


def beginnings(llm: LLM, first: int, count: int) -> TokenLists:
    """Pieces of the prompts that come with the package."""
    tokens = [llm.tokenizer.encode(item.messages[-1]["content"], add_special=False) for item in load("own")]
    pieces = [each[at : at + BEGINNING] for each in tokens for at in range(0, len(each) - BEGINNING + 1, BEGINNING)]
    assert len(pieces) >= first + count, f"there are {len(pieces)} beginnings"
    return pieces[first : first + count]


def write_random_head(config: ModelConfig, folder: Path) -> None:
    """Return an untrained head: hardly any draft token is accepted, but its KV is in the target's pages."""
    layer = LayerConfig(config.width, config.heads, config.kv_heads, config.head_dim, config.ffn)
    head = make_head(EagleConfig(layer, config.vocab, config.width, (1, config.layers // 2, config.layers)))
    head.init_weights(torch.Generator().manual_seed(0))
    write_head(head, folder)


def tree_around(prompts: TokenLists, truth: TokenLists) -> ScriptedDrafter:
    """Draft the right token after a wrong sibling: to accept it, every rank compacts its KV cache."""
    known = {tuple(prompt): text for prompt, text in zip(prompts, truth, strict=True)}

    def propose(seq: Sequence, budget: Budget) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        for token in known[seq.request.prompt][seq.num_output_tokens :][: budget.nodes // 2]:
            parents += [len(tokens) - 1] * 2
            tokens += [token + 1 if token == 0 else token - 1, token]
        return Draft(tuple(tokens), tuple(parents), "tree")

    return ScriptedDrafter(propose)


@contextmanager
def disturbed(llm: LLM, prompts: TokenLists) -> Iterator[list[int]]:
    """Preempt a sequence in every other step, and add and abort a request in every step, while this runs."""
    steps, step, engine = [0], llm.engine.step, llm.engine

    def restless() -> Any:
        steps[0] += 1
        if steps[0] % 2 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        name = f"gone{steps[0]}"
        request = llm.assembly.requests.make(name, prompts[steps[0] % len(prompts)], SamplingParams(max_tokens=8))[0]
        engine.add(request)
        found = step()
        engine.abort(name)
        return found

    engine.step = restless  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        engine.step = step  # type: ignore[method-assign]


def write(llm: LLM, prompts: TokenLists, args: argparse.Namespace, arm: str) -> tuple[TokenLists, SpeculationStats]:
    choice = SpeculationChoice(enabled=False) if arm == "none" else SpeculationChoice(drafter=arm)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, speculation=choice)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return found, SpeculationStats.total(output.speculation for output in outputs)


def write_trees(
    llm: LLM, prompts: TokenLists, truth: TokenLists, args: argparse.Namespace
) -> tuple[TokenLists, SpeculationStats]:
    """By an engine of its own over the same ranks: trees are scripted."""
    old, drafter = llm.engine, tree_around(prompts, truth)
    drafter.name = "tree"
    with_trees(llm, drafter)
    try:
        return write(llm, prompts, args, "tree")
    finally:
        llm.engine = old


def with_trees(llm: LLM, drafter: Drafter) -> None:
    old, requests = llm.engine, llm.assembly.requests
    llm.engine = Engine(old.runner, drafter, FixedController(NODES), old.scheduler, old.tokenizer)
    requests.drafter = llm.engine.drafter


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plain = LLM(args.model, drafter="none", quiet=True, quantization="none", kv_memory=0.5, max_model_len=256)
        write_random_head(plain.engine.runner.model.config, Path(folder))
        prompts = beginnings(plain, args.first, args.prompts)
        del plain
        arms = [args.drafter] if args.drafter else [f"model:{args.model}", "ngram", f"eagle:{folder}"]
        with LLM(
            args.model, drafter=",".join(arms), quiet=True, quantization="none", kv_memory=1.0, max_model_len=256,
            num_speculative_tokens=NODES, tensor_parallel_size=args.ranks, max_num_batched_tokens=512,
            tree_nodes=args.tree_nodes,
        ) as llm:  # fmt: skip
            return record(llm, prompts, arms, args)


def record(llm: LLM, prompts: TokenLists, arms: list[str], args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": args.ranks, "prompts": prompts}
    found |= {"differ": {}, "accepted": {}, "per_step": {}, "seconds": {}}
    team = llm.assembly.workers
    model, drafters = llm.engine.runner.model, llm.engine.drafter.drafters.values()
    heads = sum(head_bytes(each.head, model) for each in drafters if isinstance(each, HeadDrafter))
    found["weights"] = [weight_bytes(model) + heads, *([] if team is None else team.wait_ready())]
    found["heads"] = [heads, *([] if team is None else team.head_weights)]
    truth: TokenLists = []
    steps = [0]
    for arm in ["none", *arms, "disturbed", "tree"]:
        began, name = time.perf_counter(), arm.partition(":")[0]
        if arm == "tree":
            outputs, counted = write_trees(llm, prompts, truth, args)
        elif arm == "disturbed":
            with disturbed(llm, prompts) as steps:
                outputs, counted = write(llm, prompts, args, args.drafter or "ngram")
        else:
            outputs, counted = write(llm, prompts, args, arm)
        truth = truth or outputs
        found["differ"][name] = sum(a != b for a, b in zip(outputs, truth, strict=True))
        found["accepted"][name], found["per_step"][name] = counted.accepted, round(counted.accepted_per_step, 3)
        found["seconds"][name] = round(time.perf_counter() - began, 1)
    return found | {"texts": truth, "made_way": steps[0] // 2, "given_up": steps[0]}


def against(found: dict[str, Any], other: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Compare outputs with another run: the first differences and the margins of the two tokens."""
    assert found["prompts"] == other["prompts"], "runs of the same prompts"
    margins: list[tuple[float, float]] = []
    llm = LLM(args.model, drafter="none", quiet=True, quantization="none", kv_memory=0.5, max_model_len=256)
    for prompt, mine, theirs in zip(found["prompts"], found["texts"], other["texts"], strict=True):
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if place is not None:
            params = SamplingParams(temperature=0.0)
            scores, scale = scores_after(llm, [*prompt, *theirs[:place]], params, 0)
            margins.append((abs(float(scores[mine[place]] - scores[theirs[place]])), NEAR_TIE[torch.float32] * scale))
    ties = sum(margin <= bound for margin, bound in margins)
    return {"texts": len(found["texts"]), "differ": len(margins), "near_ties": ties, "margins": margins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--drafter", help="the only one to try")
    parser.add_argument("--tree-nodes", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    found = run(args)
    if args.out is not None:
        args.out.write_text(json.dumps(found))
    if args.against is not None:
        found["against"] = against(found, json.loads(args.against.read_text()), args)
    print(json.dumps({name: value for name, value in found.items() if name not in ("prompts", "texts")}))


if __name__ == "__main__":
    main()
