"""Evaluation of a trained drafter in the serving engine, on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretell.certify.certificate import Certificate, CertifyJob, certify
from foretell.certify.text_equality import PROMPTS, encode
from foretell.llm import LLM
from foretell.sampling_params import SamplingParams

from .medusa import HEADS_FOLDER

EVAL_TOKENS = 64  # output tokens per prompt


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Output tokens per step of one drafter at a fixed draft length."""

    accepted_per_step: float
    drafted: int  # draft tokens per step
    prompts: int


@dataclass(frozen=True)
class DrafterEvaluator:
    """The target and the prompts that drafters are evaluated with."""

    target: str
    prompts: list[list[int]]
    drafted: int  # draft tokens per step
    device: str = "auto"

    def llm(self, drafter: str) -> LLM:
        return LLM(
            self.target,
            drafter=drafter,
            device=self.device,
            num_speculative_tokens=self.drafted,
            prefix_cache=False,
            quiet=True,
        )

    def measure(self, drafter: str, temperature: float = 0.0, tokens: int = EVAL_TOKENS) -> MeasuredAcceptance:
        """Generate with a drafter, named as in `--drafter`, and count output tokens per step."""
        llm = self.llm(drafter)
        params = [
            SamplingParams(temperature=temperature, top_p=1.0, top_k=-1, max_tokens=tokens, seed=i)
            for i in range(len(self.prompts))
        ]
        outputs = llm.generate(list(self.prompts), params)
        steps = sum(each.speculation.steps for each in outputs)
        generated = sum(each.speculation.tokens for each in outputs)
        return MeasuredAcceptance(generated / max(1, steps), self.drafted, len(self.prompts))

    def certify(self, drafter: str) -> Certificate:
        """Return a quick certificate for this drafter; outputs are as long as the context allows."""
        llm = self.llm(drafter)
        longest = max(len(encode(llm.tokenizer, prompt)) for prompt in PROMPTS)
        available = llm.assembly.requests.limits.context - longest
        job = CertifyJob(quick=True, max_tokens=max(1, min(CertifyJob.max_tokens, available)))
        return certify(job, lambda: llm, lambda line: None)


def drafter_name(kind: str, folder: Path) -> str:
    """Return the value of `--drafter` for a trained drafter."""
    if kind == "streaming":
        return f"medusa:{folder / HEADS_FOLDER}"
    return f"{'distilled' if kind == 'distill' else kind}:{folder}"
