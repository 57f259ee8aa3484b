"""How likely the model itself found each token: its raw distribution, before any setting of the request."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from torch import Tensor

from foretell.types import TokenLogprob


def token_logprobs(logits: Tensor, tokens: Tokens[int], top: int) -> list[TokenLogprob]:
    """For each row of logits [rows, vocab] its token and the `top` likeliest."""
    logs = logits.double().log_softmax(-1)
    best = logs.topk(min(top, logs.shape[-1]))
    rows = []
    for i, token in enumerate(tokens):
        own = float(logs[i, token])
        rank = 1 + int((logs[i] > logs[i, token]).sum())
        pairs = zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True)
        rows.append(TokenLogprob(token, own, rank, tuple(pairs)))
    return rows
