"""Counter-based random numbers of (seed, position, stream), so that batching and drafting never change a sample."""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat

import numpy as np
import numpy.typing as npt
from torch import Tensor

TOKEN_STREAM = 0  # samples tokens; under the rule `match` target and draft share it
# Streams of the rules that verify by probabilities, keyed by the root position of a step.
ACCEPT_STREAM = 1  # accepts or rejects draft tokens
RESIDUAL_STREAM = 2  # samples the token after the accepted path
DRAFT_STREAM = 1 << 16  # node i of a draft for such a rule is sampled from stream DRAFT_STREAM + i

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _signed(x: int) -> int:
    """Return a 64-bit word as a signed integer, as torch stores it."""
    return x - (1 << 64) if x >> 63 else x


def _scramble(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 in place. int64 products wrap; shifts are masked to be logical."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(factor)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def derive_seed(seed: int, number: int) -> int:
    """Return a derived seed for each `number`; number 0 keeps the seed."""
    return seed if number == 0 else _signed(_scrambled(seed + number * _GOLDEN))


def _scrambled(x: int) -> int:
    """Apply the finalizer of splitmix64 to one word."""
    x &= _WORD
    x = ((x ^ (x >> 30)) * _FIRST) & _WORD
    x = ((x ^ (x >> 27)) * _SECOND) & _WORD
    return x ^ (x >> 31)


def uniform(seed: Tensor, position: Tensor, stream: int, lanes: Tensor) -> Tensor:
    """Return uniforms in (0, 1), [n, width] in float64, for [n] seeds, [n] positions and [width] lanes."""
    return _bits(seed, position, stream, lanes).double().add_(0.5).mul_(2.0**-52)


def exponential(seed: Tensor, position: Tensor, stream: int, lanes: Tensor) -> Tensor:
    """Return exponential noise [n, width] in float32: the argmin of e[i] / p[i] is i with probability p[i].

    Winners have small noise; log1p keeps it as precise as the probabilities are.
    """
    return _exponential(_bits(seed, position, stream, lanes))


def exponential_of(keys: Tensor, lanes: Tensor) -> Tensor:
    """Return exponential noise [n, width] for [n] keys from `keys`."""
    return _exponential(_bits_of(keys, lanes))


def _exponential(bits: Tensor) -> Tensor:
    part = bits.float().add_(0.5).mul_(2.0**-52)
    return part.clamp_max_(1 - 2.0**-24).neg_().log1p_().neg_()


def _bits(seed: Tensor, position: Tensor, stream: int, lanes: Tensor) -> Tensor:
    key = _scramble(_scramble(seed + _signed((stream * _GOLDEN) & _WORD)) + position)
    return _bits_of(key, lanes)


def _bits_of(key: Tensor, lanes: Tensor) -> Tensor:
    """Return [n, width] integers of 52 bits, so that adding 0.5 does not round up to 2 ** 52."""
    return _scramble(key[:, None] + lanes * _signed(_GOLDEN)).bitwise_and_((1 << 52) - 1)


def key(seed: int, position: int, stream: int = TOKEN_STREAM) -> int:
    """Return the key of one seed and position."""
    return _signed(_word(seed, position, stream))


@lru_cache(maxsize=4096)  # a position is sampled by draft and target, and again after a rejection
def _word(seed: int, position: int, stream: int) -> int:
    return _scrambled(_scrambled(seed + stream * _GOLDEN) + position)


def keys(seeds: list[int], positions: list[int], stream: int = TOKEN_STREAM) -> npt.NDArray[np.int64]:
    """Return the noise keys, computed on the host, for kernels that generate the noise of each lane themselves."""
    return np.array(words(seeds, positions, stream), np.uint64).view(np.int64)


def words(seeds: list[int], positions: list[int], stream: int = TOKEN_STREAM) -> list[int]:
    """Return the keys as unsigned integers, one by one: numpy's overhead equals a hundred of them."""
    return list(map(_word, seeds, positions, repeat(stream, len(seeds))))


def accept_uniforms(seed: Tensor, root: Tensor, nodes: Tensor) -> Tensor:
    """Return the uniforms [n, width] that decide acceptance, for [n] seeds, [n] root positions and [width] nodes."""
    return uniform(seed, root, ACCEPT_STREAM, nodes)


def residual_noise(seed: Tensor, root: Tensor, lanes: Tensor) -> Tensor:
    """Return exponential noise [n, width] that samples the token after the accepted path, for [width] token ids."""
    return exponential(seed, root, RESIDUAL_STREAM, lanes)


def draft_noise(seed: Tensor, root: Tensor, offset: int, lanes: Tensor) -> Tensor:
    """Return exponential noise [n, width] that samples node `offset` of each draft, for [width] token ids.

    Only for drafts that are verified by probabilities: a step must not reuse noise that an earlier, partly rejected
    step has seen, so the key is the position of the root. Siblings sampled without replacement share an offset: the
    order of one exponential race is such a sample.
    """
    return exponential(seed, root, DRAFT_STREAM + offset, lanes)
