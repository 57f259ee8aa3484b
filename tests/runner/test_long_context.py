"""Native attention over contexts of several chunks: a row's bits do not depend on how the work is divided."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.kernels.native.library import library
from foretell.models.config import ModelConfig
from foretell.types import Draft

from .harness import RunnerHarness, random_model, text
from .test_native import PLAIN, WINDOWED, around, gap, level, random_tree, same_bits

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler is here")

__all__ = ["level"]  # the fixture

CHUNK = 512  # `kChunk` of the library
CONTEXT, LENGTH = 1280, 1200  # tokens
CONFIGS = {
    "plain": replace(PLAIN, context=CONTEXT),
    "windowed": replace(WINDOWED, context=CONTEXT, windows=(600, None)),
    "one KV head": replace(PLAIN, context=CONTEXT, kv_heads=1, layers=1),
}
LONG = replace(PLAIN, context=9 * CHUNK, layers=1, heads=4, kv_heads=2, head_dim=32)  # chunks for several threads


def harness(config: ModelConfig, page_size: int = 16) -> RunnerHarness:
    return RunnerHarness(random_model(config), page_size, context=config.context)


def read_last(made: RunnerHarness, tokens: list[int], prefilled: int, pieces: list[int]) -> Tensor:
    """Return the logits of the tokens after the first `prefilled` ones, which run in steps of `pieces` tokens."""
    seq = made.open(tokens)
    made.run((seq, prefilled, Draft()))
    rows = torch.cat([made.run((seq, piece, Draft()))[0] for piece in pieces])
    made.close(seq)
    return rows


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_row_has_the_same_bits_in_any_prefill_chunks(config: ModelConfig, level: int) -> None:
    made, tokens = harness(config), text(LENGTH, config.vocab)
    whole = made.read(tokens)
    assert all(same_bits(made.read(tokens, piece), whole) for piece in (700, 511, 33))
    assert same_bits(harness(config, 5).read(tokens, 600), whole)
    for first in (CHUNK - 3, 2 * CHUNK - 1):
        assert same_bits(read_last(made, tokens, first, [1, 1, 1, 2, 8]), whole[first : first + 13])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_long_context_equals_the_reference(config: ModelConfig, level: int) -> None:
    tokens = text(LENGTH, config.vocab)
    assert gap(harness(config).read(tokens), harness(config).eager().read(tokens)) < 2e-5


@pytest.mark.parametrize("start", [CHUNK - 4, CHUNK, 2 * CHUNK - 9])
def test_a_tree_node_at_a_chunk_boundary_has_the_bits_of_plain_decoding(start: int, level: int) -> None:
    for config in (CONFIGS["plain"], CONFIGS["windowed"]):
        made, tokens = harness(config), text(LENGTH, config.vocab)
        alone, guessed = made.read(tokens), tokens[start : start + 9]
        for draft, path in ((Draft.chain(guessed), range(9)), (around(guessed, config.vocab), range(1, 18, 2))):
            seq = made.open(tokens)
            (rows,) = made.run((seq, start, draft))
            assert same_bits(rows[start:][list(path)], alone[start : start + 9])
            made.runner.compact_kv(seq, start - 1, tuple(path))
            seq.num_computed_tokens += 9
            assert same_bits(made.run((seq, 1, Draft()))[0], alone[start + 9 : start + 10]), "after KV compaction"
            made.close(seq)


def test_threads_and_company_change_no_bit(level: int) -> None:
    """One row, a few and a tree over a long context, alone and next to a short one, with one to five threads."""
    made, rng = harness(LONG), random.Random(0)
    texts = [text(length, LONG.vocab, length) for length in (LONG.context - 20, 60, 700)]
    last = [1, 4, 8, 40]
    alone = [made.read(tokens) for tokens in texts]
    seqs = [made.open(tokens) for tokens in texts]
    made.run(*((seq, len(tokens) - sum(last) - 1, Draft()) for seq, tokens in zip(seqs, texts, strict=True)))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for seq, expected in zip(seqs, alone, strict=True):
                start = seq.num_computed_tokens
                rows = torch.cat([made.run((seq, count, Draft()))[0] for count in last])
                assert same_bits(rows, expected[start : start + sum(last)])
                seq.num_computed_tokens = start
            found = made.run(*((seq, 1, random_tree(rng, 6, LONG.vocab)) for seq in seqs))
            for seq, rows, expected in zip(seqs, found, alone, strict=True):
                seq.num_computed_tokens -= 1
                assert same_bits(rows[:1], expected[seq.num_computed_tokens :][:1])
    finally:
        torch.set_num_threads(1)
