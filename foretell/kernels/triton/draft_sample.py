# mypy: ignore-errors
"""The next draft token of a head on the device: the argmax, or a sample by the exponential race (Gumbel-max)."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .sample import argmax_row, exponential, first_argmax

BLOCK = 4096  # logits in registers at once


@triton.jit
def _softmax_sum(scores, count, peak, temperature, BLOCK: tl.constexpr):
    """Return the softmax denominator relative to the peak."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        x = tl.load(scores + begin + i, mask=begin + i < count, other=float("-inf")).to(tl.float32)
        total += tl.exp(x / temperature - peak / temperature)
    return tl.sum(total, 0)


@triton.jit
def _exponential_race(scores, ids, count, peak, temperature, total, key, probs, BLOCK: tl.constexpr):
    """Return the index of the sampled logit and store the distribution in `probs`."""
    i = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1.0, tl.float32)
    index = i
    for begin in range(0, count, BLOCK):
        valid = begin + i < count
        x = tl.load(scores + begin + i, mask=valid, other=float("-inf")).to(tl.float32)
        prob = tl.exp(x / temperature - peak / temperature) / total
        tl.store(probs + begin + i, prob, mask=valid)
        score = tl.div_rn(prob, exponential(key, tl.load(ids + begin + i, mask=valid, other=0)))
        score = tl.where(valid, score, -1.0)
        index = tl.where(score > best, begin + i, index)
        best = tl.maximum(best, score)
    _, winner = first_argmax(best, index)
    return winner


@triton.jit
def _one_hot(probs, count, only, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for begin in range(0, count, BLOCK):
        tl.store(probs + begin + i, (begin + i == only).to(tl.float32), mask=begin + i < count)


@triton.jit(do_not_specialize=["key_stride"], do_not_specialize_on_alignment=["tokens", "out", "confidences", "keys"])
def _draft_sample_kernel(
    logits, ids, temperatures, keys, tokens, out, confidences, probs, stride, key_stride, count,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample a draft token of one sequence, with its confidence."""
    seq = tl.program_id(0)
    scores = logits + seq.to(tl.int64) * stride
    peak, best = argmax_row(scores, count, BLOCK)
    temperature = tl.full((), 0.0, tl.float32)
    if SAMPLES:
        temperature = tl.load(temperatures + seq)
    divisor = tl.where(temperature > 0, tl.maximum(temperature, 1e-6), 1.0)
    total = _softmax_sum(scores, count, peak, divisor, BLOCK)
    confidence = 1.0 / total
    if SAMPLES:
        seq_probs = probs + seq.to(tl.int64) * count
        if temperature > 0:
            key = tl.load(keys + seq * key_stride).to(tl.uint64, bitcast=True)
            best = _exponential_race(scores, ids, count, peak, divisor, total, key, seq_probs, BLOCK)
            x = tl.load(scores + best).to(tl.float32)
            confidence = tl.exp(x / divisor - peak / divisor) / total
        else:
            _one_hot(seq_probs, count, best, BLOCK)
    token = tl.load(ids + best)
    tl.store(tokens + seq, token)
    tl.store(out + seq, token.to(tl.float32))
    tl.store(confidences + seq, confidence)


@dataclass(frozen=True)
class DraftSampling:
    """Sampling inputs: `temperatures` [sequences], 0 for greedy, and noise `keys` [sequences].

    The draft distribution goes to `probs` [sequences, outputs].
    """

    temperatures: Tensor
    keys: Tensor
    probs: Tensor


def sample_draft_tokens(
    logits: Tensor, ids: Tensor, sampling: DraftSampling | None, tokens: Tensor, out: Tensor
) -> None:
    """Pick one token per row of logits [sequences, outputs]: the argmax, the first of equals, or a sample.

    Its id, by `ids`, goes to `tokens` [sequences]; its id and probability go to `out` [2, sequences].
    """
    num_seqs, count = logits.shape
    block = max(64, min(BLOCK, triton.next_power_of_2(count)))
    temperatures, keys, probs = (
        (out, ids, out) if sampling is None else (sampling.temperatures, sampling.keys, sampling.probs)
    )
    _draft_sample_kernel[(num_seqs,)](
        logits, ids, temperatures, keys, tokens, out[0], out[1], probs, logits.stride(0), keys.stride(0), count,
        SAMPLES=sampling is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
