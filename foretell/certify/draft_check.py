"""Does a drafter that draws at random draw from the distribution it states? The rules rest on that."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from foretell.draft.mix import MixDrafter
from foretell.llm import LLM
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, Sequence, SpeculationChoice

from .distribution_test import chi_squared_tail

BINS, SMALLEST_P = 20, 1e-4
TEMPERATURE = 0.7  # not 1, or a temperature left out of q would not show


class Watched(MixDrafter):
    """Passes on to another drafter and notes where each drawn token lies in the distribution it was drawn from."""

    def __init__(self, mix: MixDrafter) -> None:
        super().__init__(mix.drafters.values(), mix.default_drafters, mix.supervisor)
        self.places: list[float] = []

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        for draft in drafts:
            self.places += [_place(draft, node) for node in range(len(draft)) if draft.is_sampled(node)]
        return drafts


def _place(draft: Draft, node: int) -> float:
    """A number that is uniform in (0, 1) if the token was drawn from its row: the mass of what is likelier, and a part
    of its own. In order of likelihood, so that a row too flat or too steep shows."""
    assert draft.probs is not None, "a drawn node has a row"
    row, token = draft.probs[node].double(), draft.tokens[node]
    return float(row[row > row[token]].sum() + row[row == row[token]].sum() * torch.rand(()))


@dataclass(frozen=True)
class DraftCheckResult:
    """Places of drawn tokens, counted in equal bins."""

    guesses: int
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= SMALLEST_P

    @property
    def lacking(self) -> list[str]:
        """Return why the test shows nothing: Pearson's test wants five expected tokens in each bin."""
        few = f"part 3, sampled draft tokens: {self.guesses}, fewer than {5 * BINS}; give more prompts or tokens"
        return [few] if self.guesses < 5 * BINS else []


def check_guesses(llm: LLM, prompts: list[list[int]], rule: str, max_tokens: int) -> DraftCheckResult:
    """Write the prompts at a temperature with the drafter watched; each with a seed of its own."""
    drafter = llm.engine.drafter
    watched = llm.engine.drafter = Watched(drafter)
    try:
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=max_tokens, ignore_eos=True)
        each = [replace(params, seed=1000 + i) for i in range(len(prompts))]
        llm.generate(prompts, each, speculation=SpeculationChoice(rule=rule))
    finally:
        llm.engine.drafter = drafter
    return judge_places(watched.places)


def judge_places(places: list[float]) -> DraftCheckResult:
    """Pearson's test that places are uniform."""
    if not places:
        return DraftCheckResult(0, 1.0)
    counts = torch.histc(torch.tensor(places), BINS, 0, 1)
    mean = len(places) / BINS
    return DraftCheckResult(len(places), chi_squared_tail(float(((counts - mean) ** 2 / mean).sum()), BINS - 1))
