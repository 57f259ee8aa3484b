"""The data types of the KV cache: a row keeps its bits in each, and each equals its definition in torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from foretell.kernels.kv_types import KV_TYPES, decode_kv, encode_kv
from foretell.kernels.native.library import library
from foretell.models.config import ModelConfig
from foretell.types import Draft

from .harness import RunnerHarness, random_model, text
from .test_long_context import CHUNK
from .test_native import PLAIN, WIDE, WINDOWED, around, gap, level, random_tree, same_bits

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler is here")

__all__ = ["level"]  # the fixture

CONTEXT, LENGTH = 640, 600  # tokens: two chunks
CONFIGS = {name: replace(config, context=CONTEXT) for name, config in (("plain", PLAIN), ("wide", WIDE))}
CONFIGS["windowed"] = replace(WINDOWED, context=CONTEXT)
SMALL_TYPES = KV_TYPES[1:]
# A key that is rounded to another number now and then moves logits by less than the rounding of all keys does.
CLOSE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.int8: 1e-2}


def harness(config: ModelConfig, kv_dtype: torch.dtype, page_size: int = 16) -> RunnerHarness:
    return RunnerHarness(random_model(config), page_size, context=CONTEXT, kv_dtype=kv_dtype)


@pytest.mark.parametrize("kv_dtype", SMALL_TYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_row_has_the_same_bits_in_any_chunks_batch_or_tree(
    config: ModelConfig, kv_dtype: torch.dtype, level: int
) -> None:
    made, tokens, rng = harness(config, kv_dtype), text(LENGTH, config.vocab), random.Random(0)
    whole = made.read(tokens)
    assert all(same_bits(made.read(tokens, piece), whole) for piece in (311, 33))
    assert same_bits(harness(config, kv_dtype, 5).read(tokens, 200), whole)
    for start in (31, CHUNK - 4):
        seq, other = made.open(tokens), made.open(text(90, config.vocab, 2))
        tree, path = around(tokens[start : start + 9], config.vocab), range(1, 18, 2)
        rows, _ = made.run((seq, start, tree), (other, 50, random_tree(rng, 5, config.vocab)))
        assert same_bits(rows[:start], whole[:start])
        assert same_bits(rows[start:][list(path)], whole[start : start + 9])
        made.runner.compact_kv(seq, start - 1, tuple(path))
        seq.num_computed_tokens += 9
        assert same_bits(made.run((seq, 1, Draft()))[0], whole[start + 9 : start + 10]), "after KV compaction"
        made.close(seq)
        made.close(other)


@pytest.mark.parametrize("kv_dtype", SMALL_TYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_each_type_equals_its_definition(config: ModelConfig, kv_dtype: torch.dtype, level: int) -> None:
    tokens = text(120, config.vocab)
    native, eager = harness(config, kv_dtype), harness(config, kv_dtype).eager()
    exact, rounded, defined = harness(config, torch.float32).read(tokens), native.read(tokens), eager.read(tokens)
    assert 0 < gap(rounded, exact) < 0.1, "the type rounds"
    assert gap(rounded, defined) < CLOSE[kv_dtype]
    pairs = list(zip(native.runner.cache.tensors, eager.runner.cache.tensors, strict=True))
    assert all(ours.dtype == kv_dtype == theirs.dtype for ours, theirs in pairs)
    first = [decode_kv(tensor, torch.float32) for tensor in pairs[0]]
    assert (first[0] == first[1]).float().mean() > 0.99, "keys of the first layer differ by the rounding of floats only"


@pytest.mark.parametrize("kv_dtype", SMALL_TYPES, ids=str)
def test_a_stored_value_is_rounded_to_the_nearest(kv_dtype: torch.dtype) -> None:
    found = torch.randn(500, 3, 20, generator=torch.Generator().manual_seed(1))
    found[0] = 0.0
    back = decode_kv(encode_kv(found, kv_dtype), torch.float32)
    step = {torch.bfloat16: found.abs() / 2**8, torch.float16: found.abs() / 2**11 + 1e-7}
    step[torch.int8] = (found.abs().amax(-1, keepdim=True) / 254).expand_as(found) + 1e-7
    assert ((back - found).abs() <= step[kv_dtype]).all()


def test_extreme_numbers_are_converted_as_torch_does(level: int) -> None:
    """Large, denormal and zero keys and values; queries are 0, so that values are averaged."""
    config = replace(PLAIN, layers=1, heads=1, kv_heads=1, head_dim=20, width=20)
    for kv_dtype in SMALL_TYPES:
        model = random_model(config)
        model.blocks[0].attention.qkv.weight.data.mul_(1e-6)
        model.blocks[0].attention.qkv.weight.data[-8:] *= 1e8
        made = RunnerHarness(model, 4, kv_dtype=kv_dtype)
        tokens = text(20, config.vocab)
        found = made.read(tokens)
        assert gap(found, RunnerHarness(model, 4, kv_dtype=kv_dtype).eager().read(tokens)) < 1e-4
