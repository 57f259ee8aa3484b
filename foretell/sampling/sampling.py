"""Sampling: logits to probabilities and tokens, the same for target and draft."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.native.library import library
from foretell.sampling import noise
from foretell.sampling.cuda_sampler import MIN_TEMPERATURE, SamplingBatch, available, sample_on_device
from foretell.sampling.logits_processors import TokenHistory, forbidden_tokens, process_row
from foretell.sampling.native_sampler import native_sampler_for, sample_native
from foretell.sampling_params import SamplingParams
from foretell.types import TokenLogprob

MAX_TEMPERATURE = torch.finfo(torch.float32).max
TOP_P_CANDIDATES = 2048  # candidates that a top-p search sorts before it sorts the vocabulary


class SamplingRow(NamedTuple):
    """The inputs that decide the token of one row of logits."""

    params: SamplingParams
    seed: int
    position: int
    history: TokenHistory | None = None
    path: tuple[int, ...] = ()  # draft tokens between the history and this row
    allowed: Tensor | None = None  # token mask of a grammar, [vocab]


def process_logits(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Apply the logits processors of each row to logits [rows, vocab]; return the same tensor if there are none."""
    for row in rows:
        if row.history is not None:
            break
    else:
        return logits
    logits = logits.clone()
    for i, row in enumerate(rows):
        if row.history is None:
            continue
        few = forbidden_tokens(row.history, row.path)
        if row.allowed is not None or not row.history.only_masks_tokens or len(few) >= logits.shape[-1]:
            logits[i] = process_row(logits[i], row.history, row.path, row.allowed)
        elif few:  # avoids a pass over the vocabulary to mask an end token
            logits[i, few] = float("-inf")
    return logits


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """Return the token of each row of logits [rows, vocab]: the argmax at temperature 0, else a sample."""
    logits = process_logits(logits, rows)
    params: list[SamplingParams] = []
    seeds: list[int] = []
    positions: list[int] = []
    sampled = False
    for row in rows:  # one loop: host time between two steps counts
        params.append(row.params)
        seeds.append(row.seed)
        positions.append(row.position)
        sampled |= row.params.temperature > 0
    if logits.is_cuda and available():
        return sample_on_device(logits, SamplingBatch(params, seeds, positions))
    if not sampled:
        return argmax_tokens(logits)
    if (native := native_sampler_for(logits)) is not None:
        return sample_native(native, logits, params, seeds, positions)
    return sample_reference(logits, rows)


def sample_reference(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """Return what `sample` returns, by the torch definition."""
    tokens = _argmax(logits)
    sampled = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    some = logits if len(sampled) == len(rows) else logits[sampled]
    wanted = [rows[i] for i in sampled]
    tokens[sampled] = sample_from_probs(probabilities(some, [row.params for row in wanted]), wanted)
    chosen: list[int] = tokens.tolist()
    return chosen


def argmax_tokens(logits: Tensor) -> list[int]:
    """Return the argmax of each row, the first of equals: greedy sampling without logits processors."""
    tokens: list[int] = _argmax(logits).tolist()
    return tokens


def _argmax(logits: Tensor) -> Tensor:
    """Return the argmax of each row, the first of equals; NaN counts as -inf. On a CPU numpy is faster."""
    if logits.device.type != "cpu" or logits.dtype == torch.bfloat16:  # numpy has no bfloat16
        return logits.argmax(-1)
    scores = logits.numpy()
    found = scores.argmax(-1)
    if np.isnan(np.take_along_axis(scores, found[..., None], -1)).any():  # numpy returns the first NaN of a row
        found = np.where(np.isnan(scores), -np.inf, scores).argmax(-1)
    return torch.as_tensor(found)


def sample_from_probs(probs: Tensor, rows: list[SamplingRow], stream: int = noise.TOKEN_STREAM) -> Tensor:
    """Sample one token per row of probs [rows, vocab] by the exponential race (Gumbel-max) over token ids."""
    seeds = torch.tensor([row.seed for row in rows], device=probs.device)
    positions = torch.tensor([row.position for row in rows], device=probs.device)
    if any(truncates(row.params) for row in rows):
        return torch.stack([_sample_sparse(*each, stream) for each in zip(probs, seeds, positions, strict=True)])
    lanes = torch.arange(probs.shape[-1], device=probs.device)
    return (probs / noise.exponential(seeds, positions, stream, lanes)).argmax(-1)


def _sample_sparse(probs: Tensor, seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Sample from one row that is mostly 0, with noise only for tokens that can win."""
    lanes = probs.nonzero()[:, 0]
    scores = probs[lanes] / noise.exponential(seed[None], position[None], stream, lanes)[0]
    return lanes[scores.argmax()]


def truncates(params: SamplingParams) -> bool:
    """Return whether top-k, top-p or min-p exclude tokens."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def probabilities(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return the distributions of the requests, [rows, vocab]. Greedy is one-hot, not a special case downstream."""
    temperature = torch.tensor([clamp_temperature(p.temperature) for p in params], device=logits.device)
    scaled = logits / temperature[:, None]
    probs = _repair_nan_rows(scaled.softmax(-1), scaled, logits)
    for i, p in enumerate(params):
        if p.temperature == 0:
            probs[i] = 0
            probs[i, _argmax(logits[i])] = 1
        elif truncates(p):
            probs[i] = truncate_probs(probs[i], p)
    return probs


def clamp_temperature(temperature: float) -> float:
    """Return what scores are divided by: a temperature near 0 would overflow them, a huge one would itself."""
    return min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def _repair_nan_rows(probs: Tensor, scaled: Tensor, logits: Tensor) -> Tensor:
    """Repair the rows that softmax made NaN: a NaN score counts as -inf, and where no distribution is left (an
    infinite or overflowing largest score, or none at all) the row is one-hot at the argmax of its logits."""
    if probs.device.type != "cpu":  # a look at the values would wait for the device
        return probs
    for i in probs[:, 0].isnan().nonzero()[:, 0].tolist():
        kept = torch.where(logits[i].isnan(), -torch.inf, scaled[i]).softmax(-1)
        if kept[0].isnan():
            kept.zero_()[_argmax(logits[i])] = 1
        probs[i] = kept
    return probs


def truncate_probs(probs: Tensor, params: SamplingParams) -> Tensor:
    """Apply min-p, then top-k, then top-p, keeping ties, and normalize."""
    if params.min_p > 0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0)
    if 0 < params.top_k < len(probs):
        probs = torch.where(probs >= probs.topk(params.top_k).values[-1], probs, 0)
    if params.top_p < 1:
        probs = torch.where(probs >= _smallest_kept(probs, params.top_p), probs, 0)
    return probs / probs.sum()


def _sorted(probs: Tensor) -> Tensor:
    """Return probs in descending order. On a CPU numpy sorts a vocabulary in 1 ms, torch in 20 ms."""
    if probs.device.type == "cpu":
        return torch.from_numpy(np.sort(probs.numpy())[::-1].copy())
    return probs.sort(descending=True).values


def _smallest_kept(probs: Tensor, top_p: float) -> Tensor:
    """Return the probability at which the most likely tokens first sum to `top_p` of the total."""
    goal = top_p * probs.sum(dtype=torch.float64)
    best = probs.topk(min(TOP_P_CANDIDATES, len(probs))).values
    if best.sum(dtype=torch.float64) < goal:
        best = _sorted(probs)
    reached = best.cumsum(0, dtype=torch.float64) >= goal
    return best[reached.int().argmax()] if reached.any() else best[-1]


MAX_NATIVE_TOPK = 64  # largest k of the native library


def topk(logits: Tensor, count: int) -> list[list[int]]:
    """Return the top `count` tokens of each row of logits [rows, vocab], best first. No logit may be NaN.

    The order of equal logits is unspecified, as with `torch.topk`.
    """
    count = min(count, logits.shape[-1])
    native = library() if logits.is_cpu and logits.dtype == torch.float32 and count <= MAX_NATIVE_TOPK else None
    if native is not None:
        return native.topk(logits, count)
    found: list[list[int]] = logits.topk(count).indices.tolist()
    return found


def token_logprobs(logits: Tensor, tokens: Tokens[int], topk: int) -> list[TokenLogprob]:
    """Return for each row of logits [rows, vocab] the logprob and rank of its token and the `top` best tokens.

    Logprobs are of the raw distribution, before any logits processor.
    """
    logs = logits.double().log_softmax(-1)
    best = logs.topk(min(topk, logs.shape[-1]))
    rows = []
    for i, token in enumerate(tokens):
        own = float(logs[i, token])
        rank = 1 + int((logs[i] > logs[i, token]).sum())
        pairs = zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True)
        rows.append(TokenLogprob(token, own, rank, tuple(pairs)))
    return rows
