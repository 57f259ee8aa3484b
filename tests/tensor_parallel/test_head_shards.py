"""Shards of a head draft what the whole head drafts; ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.errors import RequestError
from foretell.kv.cache import KVCache
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import BlockConfig, DraftHead, HeadConfig, MedusaConfig, TargetWeights, make_head
from foretell.models.draft_heads.io import check_head_split, shard_tensor
from foretell.models.sharding import Ranks, Shard
from foretell.runner.heads.kv import HeadPages, head_layer_shapes
from foretell.runner.heads.ops import (
    BlockForwardOp,
    BlockLevelOp,
    HeadOp,
    MedusaForwardOp,
    PrefillOp,
    StepOp,
    make_head_ops,
)
from foretell.runner.heads.sampler import gather_logits
from tests.tensor_parallel.fake_ranks import FakeRanks, run_ranks
from tests.tiny import CONFIG, CONTEXT, WITH_CACHE, random_head, tiny_decoder

VOCAB = 70
THREE = {
    name: replace(
        config,
        vocab=VOCAB,
        draft_vocab=None if config.draft_vocab is None else 50,
        layer=replace(config.layer, heads=6, kv_heads=3, ffn=44, qkv_bias=True, out_bias=True, mlp_bias=True),
    )
    for name, config in WITH_CACHE.items()
}
OWN = {
    f"{name} with ends of its own": replace(THREE[name], own_embed=True, own_output=True)
    for name in ("eagle", "medusa")
}
CASES: dict[str, HeadConfig] = {**THREE, **OWN}
PAGES, PAGE_SIZE, TEXT = [3, 1, 5, 2], 4, [9, 4, 8, 30, 2, 61, 7]
READ = PrefillOp([0], [len(TEXT) - 1], [], PAGES, [len(PAGES)])


def target() -> Decoder:
    return tiny_decoder(config=replace(CONFIG, vocab=VOCAB))


def part_of(whole: DraftHead[Any], ranks: FakeRanks, size: int) -> DraftHead[Any]:
    """Return the shard that a rank loads."""
    shard, lender = Shard(ranks.rank, size), TargetWeights.of(target())
    part = make_head(whole.config, shard)
    state = whole.own_state_dict()
    for name, tensor in part.own_state_dict().items():
        tensor.copy_(shard_tensor(part, name, state[name]))
    here = part.local_tokens
    rows = (t[here.start : here.stop] for t in (lender.embed, lender.output))
    part.share_weights(TargetWeights(*rows, lender.norm, lender.norm_eps, lambda tokens: lender.output[tokens]))
    part.prepare(CONTEXT)
    part.join_ranks(ranks)
    return part


def jobs(config: HeadConfig, top: int) -> Iterator[HeadOp]:
    """Return the operations of a draft after a sequence, with arbitrary draft tokens."""
    last, before = len(TEXT) - 1, PAGES[1] * PAGE_SIZE + 1
    if isinstance(config, MedusaConfig):
        yield MedusaForwardOp([before], 2, top)
    elif isinstance(config, BlockConfig):
        back = range(config.look_back)
        known = [TEXT[place - by] if place >= by else -1 for place in range(last) for by in back]
        yield replace(READ, tokens=known)
        yield BlockForwardOp([TEXT[-1]], [last], 3, PAGES, [len(PAGES)])
        yield BlockLevelOp(0, [0], [TEXT[-1]], top, config.confidence)
        yield BlockLevelOp(2, [0, 0], [11, 69], top, config.confidence)
    else:
        yield replace(READ, tokens=TEXT[1:last])
        yield StepOp([TEXT[-1]], [last], [before], [0], [last], [1], [0], top, 16, PAGES, [len(PAGES)])
        yield StepOp([40, 69], [last + 1] * 2, [0, 0], [0, 1], [last + 1], [1, 0, 0, 1], [0, 0], top)
        yield StepOp([3], [last + 2], [1], [0], [last + 1], [0, 1, 1], [1], top)


@torch.inference_mode()
def drafts(head: DraftHead[Any], top: int = 0) -> list[torch.Tensor]:
    """Return the logits of all operations."""
    shapes = head_layer_shapes(head.config, head.shard)
    cache = KVCache(shapes, 8, PAGE_SIZE, torch.float32, torch.device("cpu"))
    work = make_head_ops(head, HeadPages.of(head, cache, 0))
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(len(TEXT) - 1, len(head.config.hidden_layers) * head.config.target_width, generator=generator)
    slots = [PAGES[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(len(states))]
    found: list[torch.Tensor] = []
    if isinstance(head.config, BlockConfig) and head.shard is None:  # it stores no hidden states
        whole: Any = head
        block_ops: Any = work
        given = whole.with_token_hints(states, torch.tensor(TEXT[:-1]))
        block_ops.store_kv(torch.tensor(slots), list(range(len(slots))), whole.fuse(given))
    else:
        work.store_hidden_states(torch.tensor(slots), states)
    for job in jobs(head.config, top):
        if isinstance(head.config, BlockConfig) and head.shard is None and isinstance(job, PrefillOp):
            continue
        answer = work.run(job)
        found += [each for each in (answer.logits, answer.confidence) if each is not None and len(each)]
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_shards_return_what_the_whole_returns(config: HeadConfig, size: int) -> None:
    whole = random_head(config, TargetWeights.of(target()))
    defined = drafts(whole)
    assert len(defined) >= 1 and defined[0].shape[-1] == config.outputs
    parts = run_ranks(size, lambda ranks: drafts(part_of(whole, ranks, size)))[0]
    for mine, theirs in zip(parts, defined, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eagle", "mtp", "block", "medusa"])
def test_top_k_logits_suffice_if_only_those_are_used(name: str) -> None:
    whole = random_head(THREE[name], TargetWeights.of(target()))
    parts = run_ranks(3, lambda ranks: drafts(part_of(whole, ranks, 3), top=4))[0]
    for mine, theirs in zip(parts, drafts(whole), strict=True):
        if mine.shape[-1] == whole.config.outputs:
            likely = theirs.softmax(-1).topk(4)
            assert torch.equal(mine.topk(4).indices, likely.indices)
            torch.testing.assert_close(mine.softmax(-1).topk(4).values, likely.values, rtol=1e-4, atol=1e-5)


def in_every_rank(config: BlockConfig) -> int:
    """Return the weights that are not sharded: the confidence head, token embeddings and mask embeddings."""
    width = config.layer.width
    words = width * (config.target_width // config.look_back) if config.look_back else 0
    return (width + 4) * config.confidence + words + (config.block - 1) * width * config.anchored


def test_each_rank_holds_its_shard_of_weights_and_pages() -> None:
    for name, config in THREE.items():
        whole, parts = make_head(config), [make_head(config, rank) for rank in Shard(0, 3).all_ranks]
        matrices = [sum(t.numel() for t in head.parameters() if t.dim() > 1) for head in (whole, *parts)]
        spare = in_every_rank(config) if isinstance(config, BlockConfig) else 0
        assert sum(matrices[1:]) == matrices[0] + 2 * spare, name
        assert max(matrices[1:]) < 0.42 * matrices[0] + spare, name
        ranked = len(
            head_layer_shapes(config, Shard(0, 3))
        )  # hidden states of a block head wait for the leader's prefill
        assert ranked == len(head_layer_shapes(config)) + isinstance(config, BlockConfig), name
        for shape, *dealt in zip(
            head_layer_shapes(config),
            *(head_layer_shapes(config, rank) for rank in Shard(0, 3).all_ranks),
            strict=False,
        ):
            assert sum(each.kv_heads * each.head_dim for each in dealt) == shape.kv_heads * shape.head_dim


class Forgetful:
    """Ranks that skip one all-reduce."""

    def __init__(self, ranks: Ranks, left_out: int) -> None:
        self.ranks, self.left_out = ranks, left_out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.left_out -= 1
        joined = self.ranks.all_reduce(x)
        return x if self.left_out == -1 else joined

    def gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        return self.ranks.gather(x, widths)


@pytest.mark.parametrize("left_out", [0, 2, 4])
def test_a_skipped_all_reduce_is_noticed(left_out: int) -> None:
    whole = random_head(THREE["eagle"], TargetWeights.of(target()))

    def one(ranks: FakeRanks) -> list[torch.Tensor]:
        part = part_of(whole, ranks, 2)
        part.join_ranks(Forgetful(ranks, left_out))
        return drafts(part)

    found = zip(run_ranks(2, one)[0], drafts(whole), strict=True)
    assert any(not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4) for mine, theirs in found)


def test_probabilities_are_right_if_one_token_has_all_the_mass() -> None:
    def one(ranks: FakeRanks) -> torch.Tensor:
        part = make_head(THREE["eagle"], Shard(ranks.rank, 2))
        part.join_ranks(ranks)
        scores = torch.full((1, len(part.local_outputs)), -200.0)
        scores[0, 7] += 300.0 * ranks.rank
        return gather_logits(part, scores, 2)

    logits = run_ranks(2, one)[0]
    assert logits.softmax(-1).argmax() == 25 + 7 and float(logits.softmax(-1).max()) == pytest.approx(1.0)


def test_more_ranks_than_a_head_can_be_split_into_are_refused() -> None:
    check_head_split(THREE["eagle"], 6, "eagle")
    check_head_split(THREE["medusa"], 32, "medusa")
    with pytest.raises(RequestError, match="the head eagle can be split into 6 parts, but there are 7 ranks"):
        check_head_split(THREE["eagle"], 7, "eagle")
