"""A distilled drafter reuses the KV of accepted draft tokens."""

from __future__ import annotations

import pytest
import torch

from foretell.draft.heads.eagle import DistilledDrafter
from foretell.kernels.native.library import library
from foretell.types import Budget, Draft, ScheduledSequence, Sequence, StepResult, VerifyResult
from tests.heads.test_head_losslessness import Scratch, remembered
from tests.heads.test_native import waiting
from tests.tiny import HEADS

pytestmark = pytest.mark.skipif(library() is None, reason="no native library here")
DEPTH = 4


def step_result(seq: Sequence, draft: Draft, accepted: int, next_token: int) -> StepResult:
    """Append some of the draft's tokens and one of the target's to a sequence."""
    share = ScheduledSequence.of(seq, 1, Budget(DEPTH))
    seq.tokens += [*draft.tokens[:accepted], next_token]
    seq.num_computed_tokens = len(seq.tokens) - 1
    verdict = VerifyResult(tuple(range(accepted)), next_token)
    return StepResult(share, draft, verdict, hidden_states=torch.zeros(1 + len(draft), 32))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("accepted", range(DEPTH + 1))
def test_the_kv_of_accepted_draft_tokens_equals_a_prefill(accepted: int, page_size: int) -> None:
    """Over several steps and sequences, some of them drafted by another drafter; bit for bit."""
    drafter, seqs = waiting(HEADS["distilled"], page_size, temperature=0.0)
    assert isinstance(drafter, DistilledDrafter)
    fresh = Scratch(HEADS["distilled"], page_size, packed=True)
    drafts = drafter.propose(seqs, [Budget(DEPTH)] * len(seqs))
    others = [Draft.chain([token + 1 for token in draft.tokens], "another") for draft in drafts]
    offered = [other if i % 3 == 2 else draft for i, (draft, other) in enumerate(zip(drafts, others, strict=True))]
    results = [step_result(seq, draft, accepted, 5) for seq, draft in zip(seqs, offered, strict=True)]
    drafter.update_kv(results)
    left = [trail.stop - trail.start for trail in map(drafter._pending.__getitem__, (seq.id for seq in seqs))]
    assert all(count <= 1 for i, count in enumerate(left) if i % 3 != 2), "only the last draft token was not run"
    for seq, draft in zip(seqs, drafter.propose(seqs, [Budget(2)] * len(seqs)), strict=True):
        defined, kept = fresh.draft_for(seq, Budget(2))
        assert (draft.tokens, draft.confidence) == (defined.tokens, defined.confidence)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(remembered(drafter, seq), kept, strict=True))
