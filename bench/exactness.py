"""What exactness costs: python bench/exactness.py. Sampling and grammars beside a step, and acceptance by rule."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from foretell import LLM, SamplingParams, SpeculationChoice
from foretell.draft.model import ModelDrafter
from foretell.hub import open_checkpoint, resolve
from foretell.models.decoder import Decoder
from foretell.models.layers import Linear
from foretell.models.load import load_model
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.logits_processors import TokenHistory
from foretell.sampling.sampling import SamplingRow, sample
from foretell.structured_output import GrammarSpec
from foretell.types import Draft, Request, ScheduledSequence

PROMPTS = (
    "Why is the sky blue?",
    "Write the opening of a story about a lighthouse keeper.",
    "Explain how to make bread.",
    "What should I see in Lisbon?",
)
SETTINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_p_flat": SamplingParams(temperature=0.8, top_p=0.95),
    "nearly_all_flat": SamplingParams(temperature=1.5, top_p=0.99),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "penalties": SamplingParams(temperature=0.8, frequency_penalty=0.5, repetition_penalty=1.1),
}


def timed(call: Callable[[], Any], rounds: int = 40) -> float:
    call()
    seen = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        seen.append(time.perf_counter() - began)
    return median(seen) * 1e3


def sampling_cost(llm: LLM, own: torch.Tensor, step: float) -> dict[str, float]:
    """Choosing one token, as a share of a step of one row."""
    vocab = llm.engine.runner.model.config.vocab
    flat = torch.randn(1, vocab) * 3  # flatter than a model's own: top-p has more to look at
    costs = {}
    for name, params in SETTINGS.items():
        logits = flat if name.endswith("flat") else own
        request = Request("bench", tuple(range(200)), params, 1, 100)

        def once(
            params: SamplingParams = params,
            request: Request = request,
            name: str = name,
            logits: torch.Tensor = logits,
        ) -> None:
            history = TokenHistory(request, list(range(300)), vocab) if name == "penalties" else None
            sample(logits, [SamplingRow(params, 1, 300, history)])

        costs[f"sampling_{name}"] = timed(once) / step
    return costs


def grammar_cost(llm: LLM, step: float) -> dict[str, float]:
    """Masks of one row and of a draft of four, as a share of a step."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
    }
    matcher = llm.assembly.grammars.compile(GrammarSpec.json_schema(schema)).matcher(
        llm.assembly.requests.limits.end_ids
    )
    text = llm.tokenizer.encode('{"name": "Maria", "age": 31, "tags": ["a", "b"]}', add_special=False)
    ones, fours = [], []
    for i, token in enumerate(text[:-5]):
        ones.append(timed(lambda: matcher.masks(), 5))
        fours.append(timed(lambda i=i: matcher.masks(Draft.chain(text[i : i + 4])), 5))
        matcher.advance([token])
    return {"grammar_one_row": median(ones) / step, "grammar_five_rows": median(fours) / step}


def step_time(llm: LLM) -> tuple[float, torch.Tensor]:
    """Milliseconds of one forward with one row, and its logits."""
    engine = llm.engine
    prompt = llm.tokenizer.encode("The sky is blue because the light of the sun " * 10)
    (request,) = llm._requests(prompt, SamplingParams(max_tokens=64), SpeculationChoice())
    track = engine.add(request)
    engine.step()
    taken = timed(lambda: engine.runner.forward([ScheduledSequence.of(track.seq, 1)], [Draft()]))
    logits = engine.runner.forward([ScheduledSequence.of(track.seq, 1)], [Draft()]).logits
    engine.abort(request.id)
    return taken, logits


def coarse_copy(bits: int) -> Decoder:
    """The default model with its matrices on a symmetric grid of a few bits: a draft with realistic disagreement."""
    model = load_model(open_checkpoint(resolve("smollm2-135m")))
    top = 2 ** (bits - 1) - 1
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, Linear) and module.weight is not None:
                groups = module.weight.data.view(module.outputs, -1, 32)
                scale = groups.abs().amax(-1, keepdim=True) / top
                groups.copy_((groups / scale).round_() * scale)
    return model


def acceptance(bits: int, nodes: int, tokens: int) -> dict[str, float]:
    """Tokens a step by rule and temperature, with the coarse copy as the draft."""
    copy = coarse_copy(bits)
    drafter = ModelDrafter(ModelRunner(copy, 512, 16, 1024), copy.config.vocab, "coarse")
    llm = LLM(drafter=drafter, num_speculative_tokens=nodes, max_model_len=1024, quiet=True)
    found = {}
    prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    for temperature in (0.7, 1.0):
        for rule in ("match", "rejection", "block"):
            params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=5, ignore_eos=True)
            outputs = llm.generate(prompts, params, speculation=SpeculationChoice(rule=rule))
            steps = sum(out.speculation.steps for out in outputs)
            found[f"{rule}_T{temperature}"] = sum(out.speculation.tokens for out in outputs) / steps
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs-only", action="store_true")
    llm = LLM(quantization="none", quiet=True)
    step, own = step_time(llm)
    result: dict[str, Any] = {"step_ms": step, "threads": torch.get_num_threads()}
    result |= sampling_cost(llm, own, step) | grammar_cost(llm, step)
    del llm
    if not parser.parse_args().costs_only:
        result["accepted_per_step_4_bits_4_nodes"] = acceptance(4, 4, 128)
        result["accepted_per_step_3_bits_4_nodes"] = acceptance(3, 4, 128)
    for name, value in result.items():
        print(f"{name:40} {value:.3f}" if isinstance(value, float) else f"{name:40} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
