"""Every family is sharded and returns what the whole returns, or is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretell.errors import RequestError
from foretell.hub import open_checkpoint
from foretell.models.load import load_model
from foretell.models.sharding import Shard, check_tensor_parallel_size
from tests.models import families
from tests.models.running import Reader, gap, logits
from tests.tensor_parallel.fake_ranks import FakeRanks, run_ranks

REFUSED = ("gemma4", "olmo2", "olmo3")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", families.ONE_EACH)
def test_the_shards_of_a_family(family: str, size: int, tmp_path: Path) -> None:
    families.save(families.ONE_EACH[family], tmp_path)
    checkpoint, tokens = open_checkpoint(tmp_path), families.text()
    whole = load_model(checkpoint)
    if family in REFUSED:
        with pytest.raises(RequestError, match=f"tensor_parallel_size: {family} .* use 1"):
            check_tensor_parallel_size(whole.config, size)
        return
    check_tensor_parallel_size(whole.config, size)

    def one(ranks: FakeRanks) -> torch.Tensor:
        part = load_model(checkpoint, shard=Shard(ranks.rank, size))
        part.join_ranks(ranks)
        return logits(Reader(part), tokens, 7)

    found = run_ranks(size, one)[0]
    assert gap(found, logits(Reader(whole), tokens)) < 1e-4
