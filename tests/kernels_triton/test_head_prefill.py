"""Head KV stored by the fused kernels equals that of the torch functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from torch import Tensor

from foretell.kernels.norm import rms_norm
from foretell.kernels.triton.eagle_inputs import NewHiddenStates, NormedTable, eagle_inputs, store_eagle_inputs
from foretell.kernels.triton.norm import norm_parts
from foretell.kv.cache import slots_of
from foretell.models.draft_heads import EagleConfig, HeadConfig, TargetWeights
from foretell.models.layers import Norm
from foretell.runner.heads.fused_draft import is_fused
from foretell.runner.heads.fused_prefill import FusedPrefill
from foretell.runner.heads.prefill import GraphPrefill
from foretell.runner.native.head_prefill import PrefillRange
from foretell.sampling_params import SamplingParams
from foretell.types import Request, Sequence
from tests.kernels_triton.test_forward import DEVICE
from tests.kernels_triton.test_heads import in_8_bits, random
from tests.tiny import HEADS, LAYER, VOCAB, random_head, tiny_decoder

PAGE, PAGES = 4, 20
READ = {
    "eagle": HEADS["eagle"],
    "one norm for all taps": HEADS["eagle with a window"],
    "all norms": EagleConfig(
        replace(LAYER, qk_norm=True, qkv_bias=True), VOCAB, 32, (2,), target_norm=True, fc_norm=True, fc_bias=True,
        norm_before_fc=True, embed_scale=2.5,
    ),
    "no norm": EagleConfig(replace(LAYER, kv_heads=4), VOCAB, 32, (0, 2)),
    "two layers": EagleConfig(LAYER, VOCAB, 32, (0, 2), layers=2, fc_norm=True, norm_output=True),
    "three layers, all norms, a window": EagleConfig(
        replace(LAYER, qk_norm=True, qkv_bias=True, window=5), VOCAB, 32, (1, 2), layers=3, norm_before_residual=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("parts", "width"), [(1, 48), (3, 32), (2, 700)])
def test_each_part_is_normed_by_itself(parts: int, width: int, dtype: torch.dtype) -> None:
    x, weights = random(5, parts * width, dtype=dtype), random(parts, width, seed=1, dtype=dtype)
    pieces = zip(x.chunk(parts, -1), weights, strict=True)
    truth = torch.cat([rms_norm(piece, weight, 1e-5) for piece, weight in pieces], -1)
    torch.testing.assert_close(norm_parts(x, weights, 1e-5), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_pairs_are_those_that_are_read_when_all_is_kept(dtype: torch.dtype, scale: float) -> None:
    """Return positions of three sequences, the first from position 0, then padded rows."""
    width, slots = 48, [8, 9, 10, 3, 4, 17, -1, -1]
    before = [8, 8, 9, 12, 3, 2, 2, 2]
    table, fresh, kept = (random(20, width, seed=i, dtype=dtype) for i in range(3))
    left, right = (random(width, seed=i, dtype=dtype) for i in (3, 4))
    tokens, own, wanted = (torch.tensor(each, device=DEVICE) for each in ([1, 5, 0, 19, 7, 7, 2, 2], slots, before))
    defined = kept.index_copy(0, own[:6], fresh[:6])
    embedded = NormedTable(table, tokens, left)
    truth, _ = eagle_inputs(embedded, NormedTable(defined, wanted, right), scale, 1e-5, False)
    states = NewHiddenStates(fresh[: len(slots)], kept, own, wanted)
    assert torch.equal(store_eagle_inputs(embedded, states, right, scale, 1e-5), truth)
    assert torch.equal(kept, defined)


class Reader:
    """A head with pages of its own that hold an earlier life's numbers."""

    def __init__(self, config: HeadConfig, kind: type[GraphPrefill], dtype: torch.dtype) -> None:
        lender = TargetWeights.of(tiny_decoder().to(DEVICE))
        head: Any = random_head(config, lender).to(dtype)
        head.share_weights(lender)  # in this type
        head.prepare(64)
        for i, norm in enumerate(each for each in head.modules() if isinstance(each, Norm)):
            norm.weight.data.copy_(random(len(norm.weight), seed=i))
        self.head, shape = head, (PAGES, PAGE, config.layer.kv_heads, config.layer.head_dim)
        self.keys, self.values = (
            [random(*shape, seed=i + 7 * layer, dtype=dtype) for layer in range(config.layers)] for i in (1, 2)
        )
        self.features = random(PAGES, PAGE, 1, config.layer.width, seed=3, dtype=dtype)
        self.reader: Any = kind(head, self.keys, self.values, self.features, PAGE)  # type: ignore[arg-type]
        assert is_fused(head, self.keys, self.features)

    @property
    def kept(self) -> list[Tensor]:
        return [*self.keys, *self.values, self.features]


def range_of(number: int, start: int, stop: int, pages: list[int], like: Reader) -> PrefillRange:
    """Return a range for a head to prefill; more than two hidden states are in two tensors."""
    tokens = [(7 * i + number) % VOCAB for i in range(stop + 1)]
    seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, stop)
    seq.pages = pages
    config = like.head.config
    states = random(
        stop - start, len(config.hidden_layers) * config.target_width, seed=number, dtype=like.features.dtype
    )
    return PrefillRange(seq, start, stop, [part for part in (states[:2], states[2:]) if len(part)])


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("config", READ.values(), ids=READ)
def test_stored_kv_equals_the_definition(config: HeadConfig, dtype: torch.dtype, near: float) -> None:
    if dtype == torch.bfloat16 and config.layers > 1 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no bfloat16, and attention is made of products")
    fused, plain = (Reader(config, kind, dtype) for kind in (FusedPrefill, GraphPrefill))
    first = [(0, 0, 3, [4, 9]), (1, 5, 6, [2, 7]), (2, 3, 9, [11, 0, 13])]
    for several in (first, [(0, 3, 8, [4, 9])], [(1, 6, 7, [2, 7]), (2, 9, 11, [11, 0, 13])]):
        for each in (fused, plain):
            with torch.inference_mode():
                assert each.reader.prefill([range_of(*one, each) for one in several], None)
        for mine, truth in zip(fused.kept, plain.kept, strict=True):
            torch.testing.assert_close(mine, truth, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["all norms", "two layers"])
def test_what_is_kept_in_8_bits_is_what_the_definition_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one quantization step of each row."""
    readers = [Reader(READ[name], kind, torch.float32) for kind in (FusedPrefill, GraphPrefill)]
    in_8_bits(monkeypatch, *(each.head for each in readers))
    for each in readers:
        with torch.inference_mode():
            assert each.reader.prefill([range_of(0, 0, 3, [4, 9], each), range_of(2, 3, 9, [11, 0, 13], each)], None)
    for mine, truth in zip(*(each.kept for each in readers), strict=True):
        torch.testing.assert_close(mine, truth, rtol=2e-2, atol=2e-2)


def test_rows_that_fill_up_leave_no_trace() -> None:
    reader = Reader(HEADS["eagle"], FusedPrefill, torch.float32)
    before = [t.clone() for t in reader.kept]
    with torch.inference_mode():
        assert reader.reader.prefill([range_of(0, 2, 5, [4, 9], reader)], None)
    assert next(iter(reader.reader.tables)).rows == 4
    slots = set(slots_of([4, 9], PAGE, 2, 5))
    for now, then in zip(reader.kept, before, strict=True):
        changed = (now != then).flatten(0, 1).flatten(1).any(1)
        assert set(changed.nonzero()[:, 0].tolist()) == slots
