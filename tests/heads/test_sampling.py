"""A head of few tokens draws as one of all of them would, where the others have no chance."""

from __future__ import annotations

import pytest
import torch

from foretell.draft.heads.sampling import sample_draft_tokens
from tests.tiny import PROMPTS, VOCAB, World, add


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"temperature": 0.0}])
def test_a_draw_over_some_tokens_is_the_draw_over_all(params: dict[str, float], rule: str) -> None:
    engine = World().engine()
    seqs = [add(engine, str(i), prompt, **params)[0].seq for i, prompt in enumerate(PROMPTS)]
    for seq in seqs:
        object.__setattr__(seq.request, "rule", rule)
    ids = torch.tensor([1, 4, 5, 11, 20, 31])
    logits = torch.randn(len(seqs), len(ids), generator=torch.Generator().manual_seed(3)) * 2
    whole = torch.full((len(seqs), VOCAB), float("-inf")).index_copy_(1, ids, logits)
    for offset in range(3):
        some, full = sample_draft_tokens(logits, seqs, offset, "fixed", ids), sample_draft_tokens(whole, seqs, offset)
        assert some.tokens == full.tokens and set(some.tokens) <= set(ids.tolist())
        assert some.confidence == pytest.approx(full.confidence)
        assert torch.allclose(some.probs, full.probs[:, ids])
