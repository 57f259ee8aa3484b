"""What a drafter is worth: tokens a step through the engine that serves it, on prompts it was not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretell.certify.certificate import Certificate, CertifyJob, certify
from foretell.certify.text_equality import PROMPTS, encode
from foretell.llm import LLM
from foretell.sampling_params import SamplingParams

from .medusa import HEADS

TOKENS = 64  # written after each prompt


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Of one drafter, at a fixed number of guesses."""

    accepted_per_step: float  # tokens a step
    drafted: int
    prompts: int


@dataclass(frozen=True)
class DrafterEvaluator:
    """The engine and prompts a drafter is measured with."""

    target: str
    prompts: list[list[int]]
    drafted: int
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

    def measure(self, drafter: str, temperature: float = 0.0, tokens: int = TOKENS) -> MeasuredAcceptance:
        """Measure a drafter by its name, as `--drafter` takes it."""
        llm = self.llm(drafter)
        params = [
            SamplingParams(temperature=temperature, top_p=1.0, top_k=-1, max_tokens=tokens, seed=i)
            for i in range(len(self.prompts))
        ]
        outputs = llm.generate(list(self.prompts), params)
        steps = sum(each.speculation.steps for each in outputs)
        written = sum(each.speculation.tokens for each in outputs)
        return MeasuredAcceptance(written / max(1, steps), self.drafted, len(self.prompts))

    def certify(self, drafter: str) -> Certificate:
        """Return a quick certificate of the text with this drafter; outputs are as long as the context allows."""
        llm = self.llm(drafter)
        longest = max(len(encode(llm.tokenizer, prompt)) for prompt in PROMPTS)
        room = llm.assembly.requests.limits.context - longest
        order = CertifyJob(quick=True, max_tokens=max(1, min(CertifyJob.max_tokens, room)))
        return certify(order, lambda: llm, lambda line: None)


def drafter_name(kind: str, folder: Path) -> str:
    """How `--drafter` names what was trained."""
    if kind == "streaming":
        return f"medusa:{folder / HEADS}"
    return f"{'distilled' if kind == 'distill' else kind}:{folder}"
