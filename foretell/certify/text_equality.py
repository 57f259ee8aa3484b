"""Part 3 of the certificate: the outputs of the same prompts with speculation on and off, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foretell.llm import LLM
from foretell.outputs import RequestOutput
from foretell.sampling import noise
from foretell.sampling.sampling import probabilities
from foretell.sampling_params import SamplingParams
from foretell.tokenizer import Tokenizer
from foretell.types import Draft, Request, ScheduledSequence, Sequence, SpeculationChoice

from .evidence import Evidence, json_fields, max_near_ties

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string, then explain it line by line.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    'Turn this into JSON with the keys name, age and city: "Maria is 31 years old and lives in Lisbon."',
    "A train leaves at nine and arrives at a quarter to one. How long does it take?",
    "Write the opening of a story about a lighthouse keeper who finds a letter.",
    "Translate into German: Good morning, I would like two rolls and a cup of coffee.",
    "Fix the spelling and give the whole text back: I recieved you're letter yesterday and was verry happy about it.",
)
# Largest difference of two scores that floating-point rounding can flip, relative to the largest logit.
NEAR_TIE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Difference:
    """The first difference of two outputs of one prompt, and the difference of the two tokens' scores there."""

    prompt: int
    position: int
    plain_token: int
    speculative_token: int
    margin: float
    bound: float

    @property
    def near_tie(self) -> bool:
        """Return whether rounding can explain the difference; never where the bound is 0."""
        return self.margin <= self.bound and self.bound > 0


@dataclass(frozen=True)
class TextResult:
    """Outputs of all prompts under one sampling setting, compared."""

    setting: str
    sequences: int
    tokens: int
    drafted: int
    accepted: int
    steps: int
    differences: tuple[Difference, ...]
    control: int = 0  # sequences that differ without speculation, in a plain batch of about as many rows

    @property
    def passed(self) -> bool:
        return all(difference.near_tie for difference in self.differences)

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.setting, self.drafted, self.accepted)

    @property
    def max_near_ties(self) -> int:
        """Return how many sequences may differ at a near-tie before rounding no longer explains it."""
        return max_near_ties(self.sequences, self.control)

    def as_json(self) -> dict[str, Any]:
        differences = [
            json_fields(each, position="place", speculative_token="guessed_token") for each in self.differences
        ]
        return json_fields(self, sequences="texts") | {
            "differences": differences,
            "passed": self.passed,
            "rejected": self.evidence.rejected,
            "most_near_ties": self.max_near_ties,
        }


def check_outputs(llm: LLM, prompts: list[str], params: SamplingParams, rule: str) -> TextResult:
    """Generate every prompt alone without speculation, then all in one batch with it, and compare."""
    tokens = [encode(llm.tokenizer, prompt) for prompt in prompts]
    plain = [llm.generate([each], params, speculation=SpeculationChoice(enabled=False))[0] for each in tokens]
    speculative = llm.generate(tokens, params, speculation=SpeculationChoice(rule=rule))
    pairs = enumerate(zip(plain, speculative, strict=True))
    differences = [_difference(llm, i, a, b, params) for i, (a, b) in pairs if _tokens(a) != _tokens(b)]
    drafted = sum(each.speculation.drafted for each in speculative)
    steps = sum(each.speculation.steps for each in speculative)
    control = 0
    if differences and steps:
        control = _control(llm, tokens, plain, params, rows=1 + round(drafted / steps))
    return TextResult(
        setting="greedy" if params.temperature == 0 else f"temperature {params.temperature:g}, seed {params.seed}",
        sequences=len(prompts),
        tokens=sum(len(_tokens(each)) for each in plain),
        drafted=drafted,
        accepted=sum(each.speculation.accepted for each in speculative),
        steps=steps,
        differences=tuple(differences),
        control=control,
    )


def _control(llm: LLM, prompts: list[list[int]], plain: list[RequestOutput], params: SamplingParams, rows: int) -> int:
    """Return how many sequences differ in a plain batch with each prompt `rows` times, the rows of a mean draft."""
    off = SpeculationChoice(enabled=False)
    batch = llm.generate([tokens for _ in range(rows) for tokens in prompts], params, speculation=off)
    return sum(_tokens(one) != _tokens(other) for one, other in zip(plain, batch, strict=False))


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode a prompt as a chat with one user message, or as it is for a model without a chat template."""
    if not tokenizer.chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def _difference(
    llm: LLM, prompt: int, plain: RequestOutput, speculative: RequestOutput, params: SamplingParams
) -> Difference:
    one, other = _tokens(plain), _tokens(speculative)
    shorter = min(len(one), len(other))
    position = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), shorter)
    if position >= shorter:  # one output is a prefix of the other, which rounding cannot explain
        return Difference(prompt, position, -1, -1, margin=float("inf"), bound=0.0)
    prefix = [*plain.prompt_token_ids, *one[:position]]
    scores, scale = scores_after(llm, prefix, params, plain.outputs[0].seed)
    margin = abs(float(scores[one[position]] - scores[other[position]]))
    runner = llm.engine.runner
    bound = 0.0 if runner.is_batch_invariant else NEAR_TIE[runner.model.dtype] * scale
    return Difference(prompt, position, one[position], other[position], margin, bound)


def scores_after(llm: LLM, tokens: list[int], params: SamplingParams, seed: int) -> tuple[torch.Tensor, float]:
    """Return the scores of which the next token is the argmax, and their scale.

    Scores are logits when greedy, else log-probabilities with the seed's exponential noise (Gumbel-max). The scale is
    the largest absolute logit over the temperature.
    """
    runner = llm.engine.runner
    seq = Sequence(-1, Request("margin", tuple(tokens), SamplingParams(), seed, 1), list(tokens))
    runner.reserve(seq, len(tokens))
    logits = runner.forward([ScheduledSequence.of(seq, len(tokens))], [Draft()]).logits
    runner.trim(seq, 0)
    scale = float(logits.abs().max())
    if params.temperature == 0:
        return logits[0], scale
    # Without top-k, top-p and min-p: a token at their cut-off is a near-tie too and must not count as impossible.
    unfiltered = SamplingParams(temperature=params.temperature)
    key = torch.tensor([[seed], [len(tokens)]], device=logits.device)
    vocab = torch.arange(logits.shape[-1], device=logits.device)
    exponentials = noise.exponential(key[0], key[1], noise.TOKEN_STREAM, vocab)[0]
    return probabilities(logits, [unfiltered])[0].double().log() - exponentials.log(), scale / params.temperature
