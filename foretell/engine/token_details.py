"""What is known of each written token, for who asks: how likely it was found, and the guesses that fell beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from foretell.sampling.logits_processors import TokenHistory
from foretell.sampling.sampling import probabilities, process_logits
from foretell.types import Draft, RejectedToken, TokenDetail, VerifyResult

if TYPE_CHECKING:
    from .verifier import VerifyCase

ROOT = -1


def details_of(case: VerifyCase, verdict: VerifyResult) -> tuple[TokenDetail, ...] | None:
    """Of the tokens the verdict lets in, each by the row that foretold it; None where nobody asked."""
    if not case.request.speculation.details:
        return None
    parents = (ROOT, *verdict.accepted_path)
    probs = _distributions(case, [parent + 1 for parent in parents])
    standing: tuple[int | None, ...] = (*verdict.accepted_path, None)  # the last token is no node of the draft
    return tuple(
        _detail(case.draft, verdict, row, parent, node)
        for row, parent, node in zip(probs, parents, standing, strict=True)
    )


def _detail(draft: Draft, verdict: VerifyResult, row: Tensor, parent: int, node: int | None) -> TokenDetail:
    token = verdict.next_token if node is None else draft.tokens[node]
    fallen = [
        RejectedToken(draft.tokens[child], _confidence(draft, child), float(row[draft.tokens[child]]))
        for child in draft.children(parent)
        if child != node
    ]
    return TokenDetail(float(row[token]), None if node is None else _confidence(draft, node), tuple(fallen))


def _confidence(draft: Draft, node: int) -> float | None:
    if draft.confidence is not None:
        return draft.confidence[node]
    return float(draft.probs[node, draft.tokens[node]]) if draft.probs is not None and draft.is_sampled(node) else None


def _distributions(case: VerifyCase, rows: list[int]) -> Tensor:
    """[rows, vocab] as the settings make them; greedy, what lies behind the choice."""
    params, logits = case.request.params, case.logits[rows]
    if case.history is not None:
        history, found = _quiet_history(case), case.rows()
        logits = process_logits(logits, [found[row]._replace(history=history) for row in rows])
    return logits.softmax(-1) if params.temperature == 0 else probabilities(logits, [params] * len(rows))


def _quiet_history(case: VerifyCase) -> TokenHistory | None:
    """What comes before, without the caller's own functions: they may count their calls, and a text must not change
    because somebody asked."""
    request = case.request
    if not request.params.logits_processors:
        return case.history
    quiet = replace(request, params=replace(request.params, logits_processors=()))
    return TokenHistory(quiet, case.share.seq.tokens, case.logits.shape[-1], case.logits.device)
