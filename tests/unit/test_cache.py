"""The page pool, the prefix cache and the KV cache."""

from __future__ import annotations

import random

import pytest
import torch

from foretell.kv.cache import KVCache, LayerShape, slots_of
from foretell.kv.pages import PagePool
from foretell.kv.prefix import PrefixIndex


def test_a_pool_allocates_all_pages_or_none() -> None:
    pool = PagePool(4, 16)
    held = pool.allocate(3)
    assert held == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    pool.release([0, 1, 2])
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_a_shared_page_is_freed_by_its_last_holder() -> None:
    pool = PagePool(2, 16)
    (page,) = pool.allocate(1) or []
    pool.acquire(page)
    pool.release([page])
    assert pool.num_held == 1
    pool.release([page])
    assert pool.num_held == 0
    with pytest.raises(AssertionError):
        pool.release([page])


def test_the_least_recently_used_cached_page_is_evicted_first() -> None:
    evicted: list[int] = []
    pool = PagePool(3, 16, evicted.append)
    for page in pool.allocate(3) or []:
        pool.mark_cached(page)
    pool.release([1])
    pool.release([0, 2])
    assert pool.allocate(3) is not None
    assert evicted == [1, 2, 0]


def test_random_operations_leave_every_page_in_one_state() -> None:
    rng = random.Random(1)
    pool = PagePool(12, 2)
    index = PrefixIndex(pool)
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(3000):
        if rng.random() < 0.5:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
            pages = index.match(tokens, "")
            assert all(index_holds(index, tokens, pages))
            fresh = pool.allocate(pool.pages_for(len(tokens)) - len(pages))
            if fresh is None:
                pool.release(pages)
                continue
            full = len(tokens) // 2
            index.insert(tokens, (pages + fresh)[:full], "", len(pages))
            held.append((tokens, pages + fresh))
        elif held:
            pool.release(held.pop(rng.randrange(len(held)))[1])
        pool.check()
        holders: dict[int, int] = {}
        for _, pages in held:
            for page in pages:
                holders[page] = holders.get(page, 0) + 1
        assert holders == {page: count for page, count in enumerate(pool._references) if count}


def index_holds(index: PrefixIndex, tokens: list[int], pages: list[int]) -> list[bool]:
    """Return for each page whether it was inserted for exactly these tokens."""
    return [index._by_page[page].key[1] == tuple(tokens[2 * i : 2 * i + 2]) for i, page in enumerate(pages)]


def test_a_match_leaves_the_last_token_to_run() -> None:
    pool = PagePool(8, 4)
    index = PrefixIndex(pool)
    pages = pool.allocate(2) or []
    assert index.insert([1, 2, 3, 4, 5, 6, 7, 8], pages, "") == 2
    assert index.match([1, 2, 3, 4, 5, 6, 7, 8], "") == pages[:1]
    assert index.match([1, 2, 3, 4, 5, 6, 7, 8, 9], "") == pages
    assert index.match([1, 2, 3, 5, 5, 6, 7, 8, 9], "") == []
    assert index.match([5, 6, 7, 8, 9], "") == [], "a page is found only after the same prefix"


def test_clearing_the_index_frees_its_pages() -> None:
    pool = PagePool(4, 2)
    index = PrefixIndex(pool)
    pages = pool.allocate(2) or []
    index.insert([1, 2, 3, 4], pages, "")
    pool.release(pages)
    index.clear()
    pool.check()
    assert len(index) == 0
    assert index.match([1, 2, 3, 4, 5], "") == []
    assert pool.allocate(4) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_slots_moves_every_layer(dtype: torch.dtype) -> None:
    shapes = (LayerShape(2, 4), LayerShape(1, 8), LayerShape(1, 6, has_values=False))
    cache = KVCache(shapes, 4, 2, dtype, torch.device("cpu"))
    for tensor in cache.tensors:
        tensor.normal_()
    before = [tensor.clone().view(8, -1) for tensor in cache.tensors]
    cache.move([3, 6], [2, 3])
    for old, tensor in zip(before, cache.tensors, strict=True):
        assert tensor.view(8, -1)[[2, 3]].equal(old[[3, 6]])
        assert tensor.view(8, -1)[[0, 1, 4, 5, 6, 7]].equal(old[[0, 1, 4, 5, 6, 7]])


def test_slots_follow_the_pages() -> None:
    assert slots_of([7, 2, 5], 4, 3, 9) == [31, 8, 9, 10, 11, 20]
    assert slots_of([7, 2, 5], 4, 5, 6) == [9]
