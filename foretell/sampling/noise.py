"""Random numbers that depend on (seed, position, stream) alone, so that batching and drafting never change a sample."""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat

import numpy as np
import numpy.typing as npt
from torch import Tensor

TOKEN_STREAM = 0  # draws tokens, for target and draft alike: under the rule `match` they share their noise
ACCEPT_STREAM, RESIDUAL_STREAM = (
    1,
    2,
)  # of the rules that judge by probabilities; these are keyed by a step's root position
DRAFT_STREAM = 1 << 16  # node i of a draft made for such a rule draws from stream DRAFT_STREAM + i

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _signed(x: int) -> int:
    """The 64-bit pattern as torch's int64 holds it."""
    return x - (1 << 64) if x >> 63 else x


def _scramble(x: Tensor) -> Tensor:
    """splitmix64's finaliser, in place; int64 products wrap, and shifts are masked to act on unsigned words."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= _signed(factor)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def derive_seed(seed: int, number: int) -> int:
    """A seed of its own for each `number`; number 0 keeps the seed."""
    return seed if number == 0 else _signed(_scrambled(seed + number * _GOLDEN))


def _scrambled(x: int) -> int:
    """As `_scramble`, of one word."""
    x &= _WORD
    x = ((x ^ (x >> 30)) * _FIRST) & _WORD
    x = ((x ^ (x >> 27)) * _SECOND) & _WORD
    return x ^ (x >> 31)


def uniform(seed: Tensor, position: Tensor, stream: int, lanes: Tensor) -> Tensor:
    """[n] seeds, [n] positions and [width] lanes -> [n, width] numbers in (0, 1), as float64."""
    return _bits(seed, position, stream, lanes).double().add_(0.5).mul_(2.0**-52)


def exponential(seed: Tensor, position: Tensor, stream: int, lanes: Tensor) -> Tensor:
    """As `uniform`, with the exponential distribution: the smallest of e[i] / p[i] is i with probability p[i].

    In float32, from whose small end the winners come: log1p keeps it as exact as the probabilities are.
    """
    return _exponential(_bits(seed, position, stream, lanes))


def exponential_of(keys: Tensor, lanes: Tensor) -> Tensor:
    """The same by [n] keys that the host worked out: see `keys`."""
    return _exponential(_bits_of(keys, lanes))


def _exponential(bits: Tensor) -> Tensor:
    part = bits.float().add_(0.5).mul_(2.0**-52)
    return part.clamp_max_(1 - 2.0**-24).neg_().log1p_().neg_()


def _bits(seed: Tensor, position: Tensor, stream: int, lanes: Tensor) -> Tensor:
    key = _scramble(_scramble(seed + _signed((stream * _GOLDEN) & _WORD)) + position)
    return _bits_of(key, lanes)


def _bits_of(key: Tensor, lanes: Tensor) -> Tensor:
    """[n, width] whole numbers of 52 bits: half of one more must not round up to 2 ** 52."""
    return _scramble(key[:, None] + lanes * _signed(_GOLDEN)).bitwise_and_((1 << 52) - 1)


def key(seed: int, position: int, stream: int = TOKEN_STREAM) -> int:
    """One of `keys`."""
    return _signed(_word(seed, position, stream))


@lru_cache(maxsize=4096)  # the same place is drawn by a draft and by the target, and again where a guess fell
def _word(seed: int, position: int, stream: int) -> int:
    return _scrambled(_scrambled(seed + stream * _GOLDEN) + position)


def keys(seeds: list[int], positions: list[int], stream: int = TOKEN_STREAM) -> npt.NDArray[np.int64]:
    """What `_bits` adds the lanes to, worked out on the host for kernels that make the rest themselves."""
    return np.array(words(seeds, positions, stream), np.uint64).view(np.int64)


def words(seeds: list[int], positions: list[int], stream: int = TOKEN_STREAM) -> list[int]:
    """The same without signs. One by one: numpy takes as long to begin as a hundred of them take."""
    return list(map(_word, seeds, positions, repeat(stream, len(seeds))))


def accept_uniforms(seed: Tensor, root: Tensor, nodes: Tensor) -> Tensor:
    """[n] seeds, [n] root positions and [width] nodes -> [n, width] uniforms that decide whether a node stands."""
    return uniform(seed, root, ACCEPT_STREAM, nodes)


def residual_noise(seed: Tensor, root: Tensor, lanes: Tensor) -> Tensor:
    """[n] seeds and roots, [width] token ids -> [n, width] exponentials that draw the token after the accepted path."""
    return exponential(seed, root, RESIDUAL_STREAM, lanes)


def draft_noise(seed: Tensor, root: Tensor, offset: int, lanes: Tensor) -> Tensor:
    """[n] seeds and roots, [width] token ids -> [n, width] exponentials that draw node `offset` of each draft.

    Only for drafts that are judged by probabilities: a step must not meet the noise that an earlier step, cut short,
    has already looked at, so the key is the root's position. Siblings without replacement may share an offset: the
    order in which one race ends is such a draw.
    """
    return exponential(seed, root, DRAFT_STREAM + offset, lanes)
