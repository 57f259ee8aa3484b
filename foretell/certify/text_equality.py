"""Part three: the same prompts with speculation on and off, compared token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.llm import LLM
from foretell.outputs import RequestOutput
from foretell.sampling import noise
from foretell.sampling.sampling import probabilities
from foretell.sampling_params import SamplingParams
from foretell.tokenizer import Tokenizer
from foretell.types import Draft, Request, ScheduledSequence, Sequence, SpeculationChoice

from .evidence import Evidence, most_near_ties

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
# How far apart two scores may be, as a share of the scores' scale, for rounding to turn them round.
NEAR_TIE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Difference:
    """Where a text first differs, and how close the two tokens were there."""

    prompt: int
    place: int
    plain_token: int
    guessed_token: int
    margin: float
    bound: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding can have turned them round; never where the bound is 0."""
        return self.margin <= self.bound and self.bound > 0


@dataclass(frozen=True)
class TextResult:
    """One way of sampling over all prompts."""

    setting: str
    texts: int
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
    def most_near_ties(self) -> int:
        """How many sequences may differ at a near-tie before rounding is no explanation."""
        return most_near_ties(self.texts, self.control)


def check_texts(llm: LLM, prompts: list[str], params: SamplingParams, rule: str) -> TextResult:
    """Write every prompt alone without drafts, then all in one batch with them."""
    tokens = [encode(llm.tokenizer, prompt) for prompt in prompts]
    plain = [llm.generate([each], params, speculation=SpeculationChoice(enabled=False))[0] for each in tokens]
    guessed = llm.generate(tokens, params, speculation=SpeculationChoice(rule=rule))
    pairs = enumerate(zip(plain, guessed, strict=True))
    found = [_difference(llm, i, a, b, params) for i, (a, b) in pairs if _tokens(a) != _tokens(b)]
    drafted, steps = (sum(getattr(each.speculation, name) for each in guessed) for name in ("drafted", "steps"))
    return TextResult(
        "greedy" if params.temperature == 0 else f"temperature {params.temperature:g}, seed {params.seed}",
        len(prompts),
        sum(len(_tokens(each)) for each in plain),
        drafted,
        sum(each.speculation.accepted for each in guessed),
        steps,
        tuple(found),
        _control(llm, tokens, plain, params, rows=1 + round(drafted / steps)) if found and steps else 0,
    )


def _control(llm: LLM, prompts: list[list[int]], plain: list[RequestOutput], params: SamplingParams, rows: int) -> int:
    """Return how many sequences differ in a plain batch that has each prompt `rows` times, as a draft has rows."""
    off = SpeculationChoice(enabled=False)
    batch = llm.generate([tokens for _ in range(rows) for tokens in prompts], params, speculation=off)
    return sum(_tokens(one) != _tokens(other) for one, other in zip(plain, batch, strict=False))


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A prompt as the model is asked it."""
    if not tokenizer.chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def _difference(
    llm: LLM, prompt: int, plain: RequestOutput, guessed: RequestOutput, params: SamplingParams
) -> Difference:
    one, other = _tokens(plain), _tokens(guessed)
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if place >= min(len(one), len(other)):  # one text is a beginning of the other: never rounding
        return Difference(prompt, place, -1, -1, float("inf"), 0.0)
    text = [*plain.prompt_token_ids, *one[:place]]
    scores, scale = scores_after(llm, text, params, plain.outputs[0].seed)
    margin = abs(float(scores[one[place]] - scores[other[place]]))
    runner = llm.engine.runner
    bound = 0.0 if runner.is_batch_invariant else NEAR_TIE[runner.model.dtype] * scale
    return Difference(prompt, place, one[place], other[place], margin, bound)


def scores_after(llm: LLM, text: list[int], params: SamplingParams, seed: int) -> tuple[torch.Tensor, float]:
    """What tokens compete with after `text`, logits or log-probabilities with their noise, and the logits' scale."""
    runner = llm.engine.runner
    seq = Sequence(-1, Request("margin", tuple(text), SamplingParams(), seed, 1), list(text))
    runner.reserve(seq, len(text))
    logits = runner.forward([ScheduledSequence.of(seq, len(text))], [Draft()]).logits
    runner.trim(seq, 0)
    scale = float(logits.abs().max())
    if params.temperature == 0:
        return logits[0], scale
    # Without top-k, top-p and min-p: a token at their edge is a near-tie too, and must not count as impossible.
    open_params = SamplingParams(temperature=params.temperature)
    key = torch.tensor([[seed], [len(text)]], device=logits.device)
    lanes = torch.arange(logits.shape[-1], device=logits.device)
    race = noise.exponential(key[0], key[1], noise.TOKEN_STREAM, lanes)[0]
    return probabilities(logits, [open_params])[0].double().log() - race.log(), scale / params.temperature
