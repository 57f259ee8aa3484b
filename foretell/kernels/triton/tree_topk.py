# mypy: ignore-errors
"""One level of a head's draft tree: the top-k children of each row, and the selection of those to expand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sample import exponential

MAX_SPLITS = 12  # programs that search a row
MIN_PADDED_NODES = 64  # smallest padded number of nodes, so that small trees share a kernel
MIN_SPLIT_OUTPUTS = 1024  # fewest outputs of a split


@triton.jit
def _pack_score(x, index):
    """Pack score and index into an int64 that sorts by score, then by lower index."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _unpack_score(packed):
    """Return the score of a packed int64."""
    bits = (packed >> 32).to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _scale_logits(x, temperature):
    """Divide logits by the temperature with the precision of the torch definition."""
    return tl.div_rn(x, tl.maximum(temperature, 1e-6))


@triton.jit(do_not_specialize=["key_stride"], do_not_specialize_on_alignment=["temperatures", "keys"])
def _split_topk_kernel(
    logits, ids, temperatures, keys, best_packed, peaks, totals, stride, key_stride, count, rows_per_seq,
    SAMPLES: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the top-k of one split of a row and the sum of its weights relative to the split's peak.

    Outputs are ranked by logit or, where the sequence samples, by their score in the exponential race (Gumbel-top-k).
    """
    row, split = tl.program_id(0), tl.program_id(1)
    at = row * tl.num_programs(1) + split
    i = split * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    x = tl.load(logits + row.to(tl.int64) * stride + i, mask=valid, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    temperature = tl.load(temperatures + row // rows_per_seq) if SAMPLES else 0.0
    if temperature > 0:
        key = tl.load(keys + row // rows_per_seq * key_stride).to(tl.uint64, bitcast=True)
        weight = tl.exp(_scale_logits(x, temperature) - _scale_logits(level, temperature))
        peak = _scale_logits(peak, temperature)
        x = tl.div_rn(weight, exponential(key, tl.load(ids + i, mask=valid, other=0)))
        total = tl.sum(x, 0)
    else:
        total = tl.sum(tl.exp(x - level), 0)
    tl.store(peaks + at, peak)
    tl.store(totals + at, total)
    empty = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
    packed = tl.where(valid, _pack_score(x, i), empty)
    for rank in range(COUNT):
        best = tl.max(packed, 0)
        tl.store(best_packed + at * COUNT + rank, best)
        packed = tl.where(packed == best, empty, packed)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "tokens", "probs"])
def _merge_topk_kernel(
    best_packed, peaks, totals, ids, temperatures, tokens, probs, rows_per_seq, width,
    SAMPLES: tl.constexpr, COUNT: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Merge the top-k of the splits of one row, each stored at its rank."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS_PADDED)
    peak = tl.load(peaks + row * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    highest = tl.max(peak, 0)
    total = tl.load(totals + row * SPLITS + split, mask=split < SPLITS, other=0.0)
    weight = tl.sum(total * tl.exp(peak - highest), 0)
    i = tl.arange(0, PADDED)
    empty = tl.full([PADDED], -0x7FFFFFFFFFFFFFFF, tl.int64)
    packed = tl.load(best_packed + row * SPLITS * COUNT + i, mask=i < SPLITS * COUNT, other=-0x7FFFFFFFFFFFFFFF)
    valid = packed > empty
    index = 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)
    score = _unpack_score(packed)
    temperature = tl.load(temperatures + row // rows_per_seq) if SAMPLES else 0.0
    if temperature > 0:  # scores of a split are relative to its own peak
        own = tl.load(peaks + row * SPLITS + i // COUNT, mask=valid, other=float("-inf"))
        race_score = score * tl.exp(own - highest)
        packed = tl.where(valid, _pack_score(race_score, index), empty)
    else:
        race_score = tl.exp(score - highest)
    rank = tl.sum((packed[None, :] > packed[:, None]).to(tl.int32), 1)
    kept = valid & (rank < COUNT)
    to = ((row // rows_per_seq) * width + row % rows_per_seq) * COUNT + rank
    token = tl.load(ids + index, mask=kept, other=0)
    tl.store(tokens + to, token.to(tl.float32), mask=kept)
    tl.store(probs + to, tl.div_rn(race_score, weight), mask=kept)  # IEEE division: no probability exceeds 1


@dataclass(frozen=True)
class DraftNoise:
    """Sampling inputs per sequence: `temperatures` [sequences], 0 for greedy, and noise `keys` [sequences]."""

    temperatures: Tensor
    keys: Tensor


def topk_children(logits: Tensor, ids: Tensor, noise: DraftNoise | None, tokens: Tensor, probs: Tensor) -> None:
    """Find the top-k children of each row of logits [sequences * rows, outputs].

    Their token ids and probabilities go to `tokens` and `probs` [sequences, width, children], the first of equals
    first. Without noise they are the most likely tokens; with noise those that lead the exponential race of their
    sequence, with their share of all race scores as probability.
    """
    (n, outputs), (num_seqs, width, children) = logits.shape, tokens.shape
    block = max(MIN_SPLIT_OUTPUTS, triton.next_power_of_2(triton.cdiv(outputs, MAX_SPLITS)))
    num_splits = triton.cdiv(outputs, block)
    best_packed = torch.empty(n, num_splits, children, dtype=torch.int64, device=logits.device)
    peaks, totals = torch.empty(2, n, num_splits, dtype=torch.float32, device=logits.device)
    temperatures, keys = (probs, ids) if noise is None else (noise.temperatures, noise.keys)
    samples, each = noise is not None, 1024 if noise is None else 512  # outputs per warp; the noise needs registers
    _split_topk_kernel[(n, num_splits)](
        logits, ids, temperatures, keys, best_packed, peaks, totals,
        logits.stride(0), keys.stride(0), outputs, n // num_seqs,
        SAMPLES=samples, COUNT=children, BLOCK=block, num_warps=max(4, min(16, block // each)),
    )  # fmt: skip
    _merge_topk_kernel[(n,)](
        best_packed, peaks, totals, ids, temperatures, tokens, probs, n // num_seqs, width,
        SAMPLES=samples, COUNT=children, SPLITS=num_splits, SPLITS_PADDED=triton.next_power_of_2(num_splits),
        PADDED=triton.next_power_of_2(num_splits * children), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "max_nodes", "width_stride"])
def _select_children_kernel(
    tokens, probs, selected, path_probs, ancestors, widths, next_path_probs, next_tokens, parent_rows, next_ancestors,
    width_stride, first, max_nodes,
    ROOT: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr, WIDTH_PADDED: tl.constexpr, NODES_PADDED: tl.constexpr,
):  # fmt: skip
    """Select the children of one sequence with the highest path probability, stored in the order of the candidates."""
    seq = tl.program_id(0)
    i = tl.arange(0, CANDIDATES)
    valid = i < ROWS * COUNT
    row = i // COUNT
    path_prob = tl.load(probs + seq * WIDTH * COUNT + i, mask=valid, other=0.0).to(tl.float64)
    if not ROOT:
        path_prob = tl.load(path_probs + seq * WIDTH + row, mask=valid, other=0.0) * path_prob
    path_prob = tl.where(valid, path_prob, -1.0)
    comes_earlier = i[None, :] < i[:, None]
    better = (path_prob[None, :] > path_prob[:, None]) | ((path_prob[None, :] == path_prob[:, None]) & comes_earlier)
    rank = tl.sum(better.to(tl.int32), 1)
    chosen = valid & (rank < WIDTH)
    index = tl.sum((chosen[None, :] & comes_earlier).to(tl.int32), 1)
    # Nodes beyond the sequence's own width are not expanded: path probability 0 keeps out their children.
    within_width = rank < tl.load(widths + seq * width_stride)
    to = seq * WIDTH + index
    tl.store(selected + to * COUNT, i.to(tl.float32), mask=chosen)
    tl.store(next_path_probs + to, tl.where(within_width, path_prob, 0.0), mask=chosen)
    token = tl.load(tokens + seq * WIDTH * COUNT + i, mask=chosen, other=0.0)
    tl.store(next_tokens + to, token.to(tl.int64), mask=chosen)
    tl.store(parent_rows + to, (seq * ROWS + row).to(tl.int64), mask=chosen)
    p = tl.arange(0, WIDTH_PADDED)
    g = tl.arange(0, NODES_PADDED)
    parent = tl.sum(tl.where((index[None, :] == p[:, None]) & chosen[None, :], row[None, :], 0), 1)
    inside = (p < WIDTH)[:, None] & (g < max_nodes)[None, :]
    seen = (g[None, :] == first + p[:, None]) | (g == 0)[None, :]
    if not ROOT:
        offsets = (seq * ROWS + parent)[:, None] * max_nodes + g[None, :]
        seen = seen | (tl.load(ancestors + offsets, mask=inside, other=0) != 0)
    tl.store(next_ancestors + (seq * WIDTH + p)[:, None] * max_nodes + g[None, :], seen.to(tl.int8), mask=inside)


@dataclass(frozen=True)
class TreeLevel:
    """The nodes of one level of the draft trees."""

    path_probs: Tensor  # [sequences, width], float64
    tokens: Tensor  # [sequences * width]
    parent_rows: Tensor  # [sequences * width]: rows of the parent level
    ancestors: Tensor  # [sequences * width, nodes], int8: tree mask, ancestors of each node and itself


def select_children(out: Tensor, widths: Tensor, parents: TreeLevel | None, first: int, max_nodes: int) -> TreeLevel:
    """Select the best children of a level and return them as the next level, whose node indices start at `first`.

    `out` [3, sequences, width, children] holds the tokens and probabilities that `topk_children` found for `parents`
    (None: the root); the indices of the selected children are stored in `out[2]`.
    """
    _, num_seqs, width, children = out.shape
    rows_per_seq, device = 1 if parents is None else width, out.device
    level = TreeLevel(
        torch.empty(num_seqs, width, dtype=torch.float64, device=device),
        torch.empty(num_seqs * width, dtype=torch.int64, device=device),
        torch.empty(num_seqs * width, dtype=torch.int64, device=device),
        torch.empty(num_seqs * width, max_nodes, dtype=torch.int8, device=device),
    )
    source = level if parents is None else parents
    _select_children_kernel[(num_seqs,)](
        out[0], out[1], out[2], source.path_probs, source.ancestors, widths,
        level.path_probs, level.tokens, level.parent_rows, level.ancestors, widths.stride(0), first, max_nodes,
        ROOT=parents is None, ROWS=rows_per_seq, COUNT=children, WIDTH=width,
        CANDIDATES=triton.next_power_of_2(rows_per_seq * children), WIDTH_PADDED=triton.next_power_of_2(width),
        NODES_PADDED=triton.next_power_of_2(max(MIN_PADDED_NODES, max_nodes)), num_warps=4,
    )  # fmt: skip
    return level
