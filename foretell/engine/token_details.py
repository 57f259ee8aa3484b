"""Per-token values that a request can ask for: logprobs, probabilities, and the draft tokens that were rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from foretell.sampling.logits_processors import TokenHistory
from foretell.sampling.sampling import probabilities, process_logits, token_logprobs
from foretell.types import Draft, RejectedToken, ScheduledSequence, TokenDetail, TokenLogprob, VerifyResult

if TYPE_CHECKING:
    from .rule_verifier import VerifyCase

ROOT = -1  # parent of a draft's first tokens


def prompt_logprobs(scheduled: ScheduledSequence, logits: Tensor) -> dict[int, TokenLogprob]:
    """Return the logprobs of the prompt tokens that these rows predict, by position."""
    prompt, count = scheduled.seq.request.prompt, scheduled.seq.request.params.prompt_logprobs
    assert count is not None, "the request wants prompt logprobs"
    tokens = prompt[scheduled.start + 1 : scheduled.start + 1 + scheduled.num_new_tokens]
    found = token_logprobs(logits[: len(tokens)], tokens, count)
    return {scheduled.start + 1 + i: each for i, each in enumerate(found)}


def output_logprobs(case: VerifyCase, result: VerifyResult) -> tuple[TokenLogprob, ...] | None:
    """Return the logprobs of the accepted tokens and of the next one, if the request wants them."""
    count = case.request.params.logprobs
    if count is None:
        return None
    tokens = [*(case.draft.tokens[node] for node in result.accepted_path), result.next_token]
    rows = [0, *(node + 1 for node in result.accepted_path)]
    return tuple(token_logprobs(case.logits[rows], tokens, count))


def token_details(case: VerifyCase, result: VerifyResult) -> tuple[TokenDetail, ...] | None:
    """Return the details of the accepted tokens and of the next one, if the request wants them."""
    if not case.request.speculation.details:
        return None
    parents = (ROOT, *result.accepted_path)
    probs = _distributions(case, [parent + 1 for parent in parents])
    nodes: tuple[int | None, ...] = (*result.accepted_path, None)  # the next token is not a node of the draft
    return tuple(
        _detail(case.draft, result, row, parent, node) for row, parent, node in zip(probs, parents, nodes, strict=True)
    )


def _detail(draft: Draft, result: VerifyResult, probs: Tensor, parent: int, node: int | None) -> TokenDetail:
    token = result.next_token if node is None else draft.tokens[node]
    rejected = [
        RejectedToken(draft.tokens[child], _confidence(draft, child), float(probs[draft.tokens[child]]))
        for child in draft.children(parent)
        if child != node
    ]
    return TokenDetail(float(probs[token]), None if node is None else _confidence(draft, node), tuple(rejected))


def _confidence(draft: Draft, node: int) -> float | None:
    if draft.confidence is not None:
        return draft.confidence[node]
    return float(draft.probs[node, draft.tokens[node]]) if draft.probs is not None and draft.is_sampled(node) else None


def _distributions(case: VerifyCase, rows: list[int]) -> Tensor:
    """Return [rows, vocab] under the request's settings; at temperature 0 the softmax that the argmax is taken of."""
    params, logits = case.request.params, case.logits[rows]
    if case.history is not None:
        history, inputs = _history_without_callbacks(case), case.rows()
        logits = process_logits(logits, [inputs[row]._replace(history=history) for row in rows])
    return logits.softmax(-1) if params.temperature == 0 else probabilities(logits, [params] * len(rows))


def _history_without_callbacks(case: VerifyCase) -> TokenHistory | None:
    """Return the history without the caller's logits processors.

    They may keep state between calls, and asking for details must not change the output.
    """
    request = case.request
    if not request.params.logits_processors:
        return case.history
    request = replace(request, params=replace(request.params, logits_processors=()))
    return TokenHistory(request, case.scheduled.seq.tokens, case.logits.shape[-1], case.logits.device)
