"""A draft that looks at tokens alone need not read again what it guessed right."""

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


def judged(seq: Sequence, draft: Draft, accepted: int, next_token: int) -> StepResult:
    """The text has grown by some of the draft's tokens and by one of the target's own."""
    share = ScheduledSequence.of(seq, 1, Budget(DEPTH))
    seq.tokens += [*draft.tokens[:accepted], next_token]
    seq.cached = len(seq.tokens) - 1
    verdict = VerifyResult(tuple(range(accepted)), next_token)
    return StepResult(share, draft, verdict, hidden_states=torch.zeros(1 + len(draft), 32))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("accepted", range(DEPTH + 1))
def test_what_was_guessed_is_remembered_as_what_is_read(accepted: int, page_size: int) -> None:
    """Steps apart, texts apart, some of them guessed for by another; to the last bit."""
    drafter, seqs = waiting(HEADS["distilled"], page_size, temperature=0.0)
    assert isinstance(drafter, DistilledDrafter)
    fresh = Scratch(HEADS["distilled"], page_size, packed=True)
    drafts = drafter.propose(seqs, [Budget(DEPTH)] * len(seqs))
    others = [Draft.chain([token + 1 for token in draft.tokens], "another") for draft in drafts]
    shown = [other if i % 3 == 2 else draft for i, (draft, other) in enumerate(zip(drafts, others, strict=True))]
    outcomes = [judged(seq, draft, accepted, 5) for seq, draft in zip(seqs, shown, strict=True)]
    drafter.update_kv(outcomes)
    left = [trail.stop - trail.start for trail in map(drafter._pending.__getitem__, (seq.id for seq in seqs))]
    assert all(count <= 1 for i, count in enumerate(left) if i % 3 != 2), "only the last guess was not looked at"
    for seq, draft in zip(seqs, drafter.propose(seqs, [Budget(2)] * len(seqs)), strict=True):
        defined, kept = fresh.guess(seq, Budget(2))
        assert (draft.tokens, draft.confidence) == (defined.tokens, defined.confidence)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(remembered(drafter, seq), kept, strict=True))
