"""Shards cover the model exactly once, and KV heads stay with their queries."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from foretell.errors import RequestError
from foretell.models.config import ModelConfig
from foretell.models.load import weight_bytes
from foretell.models.sharding import Shard, check_tensor_parallel_size

BASE = ModelConfig(vocab=320, width=64, layers=1, heads=9, kv_heads=3, head_dim=8, ffn=192, context=64)
CONFIGS = {
    "three groups": BASE,
    "eight": replace(BASE, heads=64, kv_heads=8, ffn=1000),
    "one key head": replace(BASE, heads=5, kv_heads=1, vocab=131),
    "no groups": replace(BASE, heads=6, kv_heads=6, ffn=7, vocab=33),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_part_is_on_one_rank(config: ModelConfig) -> None:
    share = config.heads // config.kv_heads
    for size in range(1, min(config.heads, config.ffn) + 1):
        check_tensor_parallel_size(config, size)
        ranks = Shard(0, size).all_ranks
        assert [h for rank in ranks for h in rank.heads(config)] == list(range(config.heads))
        assert [i for rank in ranks for i in rank.ffn(config)] == list(range(config.ffn))
        assert [i for rank in ranks for i in rank.vocab(config)] == list(range(config.vocab))
        for rank in ranks:
            part, keys = rank.local_config(config), rank.kv_heads(config)
            assert part.heads > 0 and part.heads % part.kv_heads == 0
            assert {head // share for head in rank.heads(config)} == set(keys), "it has the KV heads of its queries"
        holders = Counter(head for rank in ranks for head in rank.kv_heads(config))
        assert max(holders.values()) - min(holders.values()) <= 1
        assert size > config.kv_heads or set(holders.values()) == {1}


def test_kv_heads_that_do_not_divide_are_split_in_whole_groups() -> None:
    assert [len(rank.kv_heads(BASE)) for rank in Shard(0, 2).all_ranks] == [2, 1]
    assert [len(rank.heads(BASE)) for rank in Shard(0, 2).all_ranks] == [6, 3]
    assert [list(rank.kv_heads(BASE)) for rank in Shard(0, 4).all_ranks] == [[0], [0], [1], [2]]
    assert [len(rank.heads(BASE)) for rank in Shard(0, 4).all_ranks] == [2, 1, 3, 3]


def test_runs_are_whole_units_where_there_are_enough() -> None:
    config = replace(BASE, ffn=1536, vocab=49152)
    assert [len(rank.ffn(config)) for rank in Shard(0, 3).all_ranks] == [512, 512, 512]
    assert all(rank.ffn(config).start % 32 == 0 for rank in Shard(0, 5).all_ranks)


def test_shards_get_smaller_with_more_ranks() -> None:
    """Sizes of SmolLM2-135M; only norms are replicated."""
    config = ModelConfig(
        vocab=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, context=64, tied=False
    )
    whole = weight_bytes(config, torch.float32)
    for size, most in ((2, 0.53), (3, 0.34)):
        held = [weight_bytes(rank.local_config(config), torch.float32) for rank in Shard(0, size).all_ranks]
        assert max(held) < most * whole
        assert whole <= sum(held) < 1.001 * whole


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(RequestError, match="use 9 or fewer"):
        check_tensor_parallel_size(BASE, 10)
