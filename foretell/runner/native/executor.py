"""The native executor: a step in one call of the native library, on a CPU in float32 with float or int weights."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence

import torch

from foretell.kernels.bounds import require
from foretell.kernels.kv_types import KV_TYPES
from foretell.kernels.native.library import Library, library
from foretell.kernels.native.records import ALL_REDUCE, LayerRecord, ModelRecord, StepRecord, pack_record
from foretell.kv.cache import KVCache
from foretell.models.decoder import Block, Decoder, has_plain_logits
from foretell.models.fast_paths import missing_fast_path
from foretell.models.layers import Linear, Norm
from foretell.models.sharding import Ranks
from foretell.runner.batch_layout import BatchLayout, flatten_spans
from foretell.runner.executor import Executor, StepOutput


def native_executor(model: Decoder, cache: KVCache) -> NativeExecutor | None:
    """Return the native executor if the library supports all layers and the model is on the CPU in float32."""
    on_cpu = model.embed.device.type == "cpu" and model.dtype == torch.float32
    if not on_cpu or model.config.head_dim % 2 or missing_fast_path(model.config, "cpu", model.config.context):
        return None
    native = library()
    if native is None:
        return None
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    return NativeExecutor(native, model, cache) if all(layer.native is not None for layer in layers) else None


class NativeExecutor(Executor):
    """Returns what `EagerExecutor` returns, up to rounding; a row's bits do not depend on the rest of the step."""

    is_batch_invariant = True

    def __init__(self, native: Library, model: Decoder, cache: KVCache) -> None:
        self._native, self._model, self._cache = native, model, cache
        self._vocab, self._width = model.config.vocab, model.config.width
        self._slots = cache.keys[0].shape[0] * cache.page_size
        self._context = min(len(table) for table in model.rope_tables.values())
        self._layers = (LayerRecord * model.config.layers)(*(self._layer(i) for i in range(model.config.layers)))
        self._record = self._model_record()
        self._held = (
            *model.rope_tables.values(),
            *model.query_scales.values(),
            model.embed,
        )  # kept alive: the records hold only addresses
        self._all_reduce = AllReduceCallback(model.ranks) if model.ranks is not None else None

    def forward(self, packed: BatchLayout, hidden_layers: tuple[int, ...]) -> StepOutput:
        tokens, positions, slots = packed.tokens, packed.positions, packed.slots
        require(min(tokens) >= 0 and max(tokens) < self._vocab, "tokens of the model's vocabulary")
        require(max(positions) < self._context, "positions within the model's context")
        require(0 <= min(slots) <= max(slots) < self._slots, "slots of the KV cache")
        require(
            not hidden_layers or 0 <= min(hidden_layers) <= max(hidden_layers) <= len(self._layers),
            "hidden states of the model's layers",
        )
        rows, wanted = len(tokens), len(packed.logits_indices)
        numbers, addresses = pack_int64(
            (tokens, positions, slots, *flatten_spans(packed.spans), packed.logits_indices, hidden_layers, [0] * wanted)
        )
        logits = torch.empty(wanted, self._model.local.vocab)
        hidden_states = torch.empty(rows, len(hidden_layers) * self._width) if hidden_layers else None
        step = pack_record(
            StepRecord,
            *addresses[:-1],
            logits.data_ptr(),
            None if hidden_states is None else hidden_states.data_ptr(),
            addresses[-1],
            rows,
            len(packed.spans),
            wanted,
            len(hidden_layers),
            None if self._all_reduce is None else self._all_reduce.address,
        )
        self._native.forward(self._record, step)
        if self._all_reduce is None and has_plain_logits(self._model.config):
            return StepOutput(
                logits, hidden_states, numbers[len(numbers) - wanted :].tolist
            )  # the argmax, written by the library
        if self._all_reduce is not None:
            self._all_reduce.check()
        return StepOutput(self._model.finish_logits(logits), hidden_states)

    def _layer(self, index: int) -> LayerRecord:
        block = self._model.blocks[index]
        assert isinstance(block, Block), "a decoder is made of blocks"
        attention, ffn = block.attention, block.ffn
        linears = (attention.qkv, attention.out, ffn.gate_up, ffn.down)
        norms = (block.attention_norm, block.ffn_norm, attention.q_norm, attention.k_norm)
        return LayerRecord(
            *(_weights(linear) for linear in linears),
            *(_norm(norm) for norm in (*norms, block.attention_post_norm, block.ffn_post_norm)),
            self._model.rope_tables[attention.rope].data_ptr(),
            self._cache.keys[index].data_ptr(),
            self._cache.values[index].data_ptr(),
            attention.window or 0,
            _address(self._model.query_scales.get(attention.rope)),
        )

    def _model_record(self) -> ModelRecord:
        model, config = self._model, self._model.local
        assert model.head.native is not None, "native_executor has checked"
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
            model.local_tokens.start,
            len(model.local_tokens),
            config.full_qk_norm,
            config.norm_eps,
            config.scale,
            config.embed_scale,
            config.residual_scale,
            config.activation == "gelu_tanh",
            model.head.native.level,
            KV_TYPES.index(self._cache.kv_dtype),
        )


def pack_int64(lists: tuple[Sequence[int], ...]) -> tuple[array[int], list[int]]:
    """Pack lists of integers into one array; return it and the address of each list.

    One array takes less time than six, and numpy arrays take longer to create and to get the address of.
    """
    numbers = array("q", itertools.chain.from_iterable(lists))
    address, _ = numbers.buffer_info()
    addresses = []
    for each in lists:
        addresses.append(address)
        address += 8 * len(each)
    return numbers, addresses


class AllReduceCallback:
    """Lets the library all-reduce over the ranks in the middle of a step."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._error: BaseException | None = None
        self._callback = ALL_REDUCE(self._all_reduce)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value

    def _all_reduce(self, address: int, count: int) -> bool:
        """Keep an error, since it cannot pass through the library, and make the library stop."""
        try:
            numbers = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
            joined = self._ranks.all_reduce(numbers)
            if joined.data_ptr() != address:
                numbers.copy_(joined)
        except BaseException as error:
            self._error = error
        return self._error is None

    def check(self) -> None:
        """Raise the error that made the library stop."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _weights(layer: Linear) -> int:
    assert layer.native is not None, "native_executor has checked"
    return layer.native.address


def _norm(norm: Norm | None) -> int | None:
    return None if norm is None else _address(norm.weight)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
