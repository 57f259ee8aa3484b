"""A step in one call of the native library: on a CPU in float32, with weights in floats or integers."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from foretell.kernels.attention import Span
from foretell.kernels.native.library import Library, library
from foretell.kernels.native.records import LayerRecord, ModelRecord, StepRecord
from foretell.kv.cache import KVCache
from foretell.models.decoder import Block, Decoder
from foretell.models.layers import Linear, Norm

from .executor import StepOutput
from .pack import Packed

Whole = npt.NDArray[np.int64]


def native_executor(model: Decoder, cache: KVCache) -> NativeExecutor | None:
    """The executor, where the library has all of the model's layers and computes where they are."""
    native = library()
    on_cpu = model.embed.device.type == "cpu" and model.dtype == torch.float32
    if native is None or not on_cpu or model.config.head_dim % 2:
        return None
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    return NativeExecutor(native, model, cache) if all(layer.native is not None for layer in layers) else None


class NativeExecutor:
    """What `EagerExecutor` gives, rounding aside. A row has the same bits whatever else is in the step."""

    def __init__(self, native: Library, model: Decoder, cache: KVCache) -> None:
        self._native, self._model, self._cache = native, model, cache
        self._vocab, self._width = model.config.vocab, model.config.width
        self._context = min(len(table) for table in model.tables.values())
        self._layers = (LayerRecord * model.config.layers)(*(self._layer(i) for i in range(model.config.layers)))
        self._record = self._model_record()
        self._held = (*model.tables.values(), model.embed)  # the records have addresses only

    def __call__(self, packed: Packed, taps: tuple[int, ...]) -> StepOutput:
        table = packed.table
        assert table[0].max() < self._vocab and table[1].max() < self._context, "what the tables hold"
        assert all(0 <= tap <= len(self._layers) for tap in taps), "layers that are there"
        lists = (*_span_lists(packed.spans), packed.wanted, taps, [0] * len(packed.wanted))
        rows, wanted = packed.rows, len(packed.wanted)
        numbers, places = _laid_out(lists)
        logits = torch.empty(wanted, self._vocab)
        features = torch.empty(rows, len(taps) * self._width) if taps else None
        first = table.ctypes.data
        step = StepRecord(
            *(first, first + 8 * rows, first + 16 * rows),
            *places[:-1],
            logits.data_ptr(),
            None if features is None else features.data_ptr(),
            places[-1],
            rows,
            len(packed.spans),
            wanted,
            len(taps),
        )
        self._native.step(self._record, step)
        return StepOutput(logits, features, numbers[len(numbers) - wanted :].tolist)

    def _layer(self, index: int) -> LayerRecord:
        block = self._model.blocks[index]
        assert isinstance(block, Block), "a decoder is made of blocks"
        attention, ffn = block.attention, block.ffn
        linears = (attention.qkv, attention.out, ffn.gate_up, ffn.down)
        norms = (block.attention_norm, block.ffn_norm, attention.q_norm, attention.k_norm)
        return LayerRecord(
            *(_weights(linear) for linear in linears),
            *(_norm(norm) for norm in (*norms, block.attention_post_norm, block.ffn_post_norm)),
            self._model.tables[attention.rope].data_ptr(),
            self._cache.keys[index].data_ptr(),
            self._cache.values[index].data_ptr(),
            attention.window or 0,
        )

    def _model_record(self) -> ModelRecord:
        model, config = self._model, self._model.config
        assert model.head.native is not None, "native_executor looked"
        return ModelRecord(
            ctypes.addressof(self._layers),
            _weights(model.head),
            model.embed.data_ptr(),
            _norm(model.norm),
            config.layers,
            config.width,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.ffn,
            self._cache.page_size,
            config.norm_eps,
            config.scale,
            config.embed_scale,
            config.activation == "gelu_tanh",
            model.head.native.level,
        )


def _span_lists(spans: list[Span]) -> tuple[list[int], list[int], list[int]]:
    """Of each span what `foretell::Span` has, and the pages and parents of all."""
    rows: list[int] = []
    pages: list[int] = []
    parents: list[int] = []
    for span in spans:
        rows += (span.first, span.rows, span.start, len(pages), len(span.parents), len(parents))
        pages += span.pages
        parents += span.parents
    return rows, pages, parents


def _laid_out(lists: tuple[Sequence[int], ...]) -> tuple[Whole, list[int]]:
    """All numbers one after the other, and the addresses where each list begins: one array is sooner made than six."""
    numbers = np.array([number for each in lists for number in each], np.int64)
    first = numbers.ctypes.data
    begins = itertools.accumulate((len(each) for each in lists[:-1]), initial=0)
    return numbers, [first + 8 * begin for begin in begins]


def _weights(layer: Linear) -> int:
    assert layer.native is not None, "native_executor looked"
    return layer.native.address


def _norm(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
