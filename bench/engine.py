"""The engine alone: python bench/engine.py [--quick]. Needs transformers for the first comparison."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.cli.demo import EDIT, QUESTION
from foretell.hub import open_checkpoint, resolve
from foretell.models.load import load_model
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.executor import Executor, StepOutput
from foretell.types import Draft, ScheduledSequence

PLAIN = SpeculationChoice(enabled=False)


def transformers_reference(name: str = "smollm2-135m") -> Any:
    """A transformers Llama with the very weights our decoder has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = load_model(open_checkpoint(resolve(name)))
    c = ours.config
    config = LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.width,
        intermediate_size=c.ffn,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context,
        rope_parameters={"rope_type": "default", "rope_theta": c.ropes[0].theta},
        tie_word_embeddings=c.tied,
    )
    theirs = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        theirs.model.embed_tokens.weight.copy_(ours.embed)
        theirs.model.norm.weight.copy_(ours.norm.weight)
        for mine, other in zip(ours.blocks, theirs.model.layers, strict=True):
            _copy_block(mine, other, c.heads * c.head_dim, c.kv_heads * c.head_dim)
    return theirs


def _copy_block(mine: Any, other: Any, queries: int, keys: int) -> None:
    q, k, v = mine.attention.qkv.weight.split([queries, keys, keys])
    gate, up = mine.ffn.gate_up.weight.chunk(2)
    attention, mlp = other.self_attn, other.mlp
    pairs = [
        (attention.q_proj, q),
        (attention.k_proj, k),
        (attention.v_proj, v),
        (attention.o_proj, mine.attention.out.weight),
        (mlp.gate_proj, gate),
        (mlp.up_proj, up),
        (mlp.down_proj, mine.ffn.down.weight),
        (other.input_layernorm, mine.attention_norm.weight),
        (other.post_attention_layernorm, mine.ffn_norm.weight),
    ]
    for module, weight in pairs:
        module.weight.copy_(weight)


def transformers_model() -> tuple[Any, Callable[[list[int], int], float]]:
    """The same weights in transformers, and a function that times its decoding."""
    model = transformers_reference()

    def seconds(prompt: list[int], tokens: int) -> float:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)

        def go(new: int) -> float:
            began = time.perf_counter()
            model.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
            return time.perf_counter() - began

        return (go(tokens + 1) - go(1)) / tokens  # the prompt and the first token cancel

    return model, seconds


def ours(llm: LLM, prompts: list[list[int]], tokens: int, choice: SpeculationChoice = PLAIN) -> tuple[float, Any]:
    """Seconds a token of decoding, over the whole batch."""
    params = SamplingParams(max_tokens=tokens + 1, ignore_eos=True)
    outputs = llm.generate(prompts, params, speculation=choice)
    written = sum(len(out.outputs[0].token_ids) - 1 for out in outputs)
    return max(out.timings.total for out in outputs) - max(out.timings.first_token for out in outputs), (
        written,
        outputs,
    )


def against_transformers(llm: LLM, prompt: list[int], tokens: int, rounds: int) -> dict[str, float]:
    model, theirs = transformers_model()
    theirs(prompt, 4)
    ratios, ms = [], []
    for _ in range(rounds):
        other = theirs(prompt, tokens)
        seconds, (written, _) = ours(llm, [prompt], tokens)
        mine = seconds / written
        ratios.append(other / mine)
        ms.append((mine * 1e3, other * 1e3))
    del model
    return {
        "plain_over_transformers": median(ratios),
        "plain_ms_a_token": median(a for a, _ in ms),
        "transformers_ms_a_token": median(b for _, b in ms),
    }


def step_by_rows(llm: LLM, prompt: list[int], rounds: int) -> dict[str, float]:
    """Time of one forward with 1 to 16 rows of one sequence."""
    engine = llm.engine
    (request,) = llm._requests(prompt, SamplingParams(max_tokens=64), PLAIN)
    track = engine.add(request)
    engine.step()
    seq, times = track.seq, {rows: [] for rows in (1, 2, 4, 8, 16)}
    engine.runner.reserve(seq, len(seq.tokens) + 16)
    for _ in range(rounds):
        for rows, seen in times.items():
            share, draft = ScheduledSequence.of(seq, 1), Draft.chain([5] * (rows - 1), "bench")
            began = time.perf_counter()
            engine.runner.forward([share], [draft])
            seen.append(time.perf_counter() - began)
    engine.abort(request.id)
    one = median(times[1])
    return {f"rows_{rows}": median(seen) / one for rows, seen in times.items()} | {"row_1_ms": one * 1e3}


class HostTimer(Executor):
    """Counts the time spent inside the runner's executor, to know what the loop costs around it."""

    def __init__(self, llm: LLM) -> None:
        self.runner, self.inside = llm.engine.runner, 0.0
        self.executor = self.runner.executor

    def __enter__(self) -> HostTimer:
        self.runner.executor = self
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.executor = self.executor

    def forward(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        began = time.perf_counter()
        try:
            return self.executor.forward(packed, taps)
        finally:
            self.inside += time.perf_counter() - began


def host_time(llm: LLM, prompt: list[int], batch: int, steps: int) -> float:
    """Milliseconds a step outside the executor, which runs the model, at this batch."""
    engine = llm.engine
    requests = [
        llm._requests(prompt[i:], SamplingParams(max_tokens=steps + 8, ignore_eos=True), PLAIN)[0] for i in range(batch)
    ]
    for request in requests:
        engine.add(request)
    while any(track.seq.num_output_tokens == 0 for track in engine.states.values()):
        engine.step()
    costs = []
    with HostTimer(llm) as timer:
        for _ in range(steps):
            timer.inside, began = 0.0, time.perf_counter()
            engine.step()
            costs.append(time.perf_counter() - began - timer.inside)
    for request in requests:
        engine.abort(request.id)
    return median(costs) * 1e3


def batch_of_8(llm: LLM, prompt: list[int], tokens: int, rounds: int) -> float:
    ratios = []
    for _ in range(rounds):
        one, (written, _) = ours(llm, [prompt], tokens)
        eight, (more, _) = ours(llm, [prompt[i:] for i in range(8)], tokens)
        ratios.append((more / eight) / (written / one))
    return median(ratios)


def edit(llm: LLM, rounds: int) -> dict[str, Any]:
    """N-gram drafts on an edit-this-text prompt against plain decoding."""
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": EDIT}])
    params = SamplingParams(max_tokens=128)
    ratios: list[float] = []
    for _ in range(rounds):
        (plain,) = llm.generate([prompt], params, speculation=PLAIN)
        (speculative,) = llm.generate([prompt], params)
        ratios.append(plain.timings.decode / speculative.timings.decode)
    return {
        "edit_ratio": median(ratios),
        "edit_steps_over_plain": speculative.speculation.steps / plain.speculation.steps,
        "edit_same_text": speculative.outputs[0].token_ids == plain.outputs[0].token_ids,
    }


def start_up() -> dict[str, float]:
    """Seconds of `foretell --help`, and until `foretell generate` has its first token."""
    env = dict(os.environ)

    def seconds(*words: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "foretell", *words], check=True, capture_output=True, env=env)
        return time.perf_counter() - began

    return {
        "help_s": median(seconds("--help") for _ in range(5)),
        "first_token_s": median(seconds("generate", "Hello", "--max-tokens", "1") for _ in range(3)),
    }


def memory() -> dict[str, float]:
    """Peak resident memory of a process that loads the model and writes; pages not written to take none."""
    code = (  # VmHWM: ru_maxrss would count what this process held when it forked
        "import json; from foretell import LLM, SamplingParams;"
        "llm = LLM(quantization='none', quiet=True, kv_memory=0.4);"
        "llm.generate('Hello', SamplingParams(max_tokens=16));"
        "peak = next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM'));"
        "print(json.dumps(peak))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return {"peak_gib": json.loads(done.stdout) / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, tokens = (3, 24) if quick else (7, 64)
    llm = LLM(quantization="none", quiet=True, prefix_cache=False)
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    ours(llm, [prompt], 8)
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rounds": rounds}
    result |= step_by_rows(llm, prompt, 3 * rounds)
    result |= {"host_ms_batch_1": host_time(llm, prompt, 1, 40), "host_ms_batch_8": host_time(llm, prompt, 8, 40)}
    result["host_ms_a_sequence"] = (result["host_ms_batch_8"] - result["host_ms_batch_1"]) / 7
    result["batch_8_over_1"] = batch_of_8(llm, prompt, tokens, rounds)
    result |= edit(llm, rounds)
    result |= against_transformers(llm, prompt, tokens, rounds)
    result |= start_up() | memory()
    for name, value in result.items():
        print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
