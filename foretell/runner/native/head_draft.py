"""Drafts of a head in one call of the native library, on a CPU in float32. The head's own `step` defines them."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.bounds import require
from foretell.kernels.kv_types import KV_TYPES
from foretell.kernels.native.library import SAMPLING_ROW, Library, library
from foretell.kernels.native.records import (
    BlockDraftRecord,
    BlockHeadRecord,
    DraftChainRecord,
    HeadRecord,
    LayerRecord,
    MedusaDraftRecord,
    MedusaRecord,
    pack_record,
)
from foretell.models.draft_heads import BlockHead, DraftHead, MedusaHead
from foretell.models.draft_heads.layer import HeadLayer
from foretell.models.layers import Linear, Norm
from foretell.runner.native.executor import pack_int64


@dataclass(frozen=True)
class DraftRequest:
    """Sequences to draft for, as parallel lists."""

    tokens: list[int]  # the last token of each sequence
    positions: list[int]  # of that token
    pages: list[list[int]]
    depths: list[int]  # draft tokens at most
    min_probabilities: list[float]  # a draft ends when its probability falls below this


@dataclass(frozen=True)
class DraftResult:
    """Draft tokens and their confidence, by depth and sequence."""

    tokens: list[list[int]]
    confidence: list[list[float]]
    probs: Tensor | None = None  # [sequences, depth, vocab]: the distributions that tokens were sampled from


class DraftBuffers:
    """A request in the library's layout, and buffers for `depth` draft tokens per sequence.

    Plain arrays: numpy arrays take longer to create, and longer still to get the address of.
    """

    def __init__(self, request: DraftRequest, depth: int) -> None:
        """`depth` 0: no output buffers, and no addresses of them."""
        self.num_sequences, self.depth = len(request.tokens), depth
        pages = list(chain.from_iterable(request.pages))
        first_pages = list(accumulate(map(len, request.pages[:-1]), initial=0))
        outputs = self.num_sequences * depth
        self._numbers, addresses = pack_int64(
            (request.tokens, request.positions, pages, first_pages, request.depths, [0] * outputs)
        )
        self._floats = array("f", chain(request.min_probabilities, repeat(0.0, outputs)))
        floats, _ = self._floats.buffer_info()
        self.inputs = (*addresses[:-1], floats)
        confidence = floats + self._floats.itemsize * self.num_sequences
        self.outputs = (addresses[-1], confidence) if outputs else (None, None)

    def result(self, depth: int, probs: Tensor | None = None) -> DraftResult:
        """Return the first `depth` levels of the output buffers."""
        width, outputs = self.num_sequences, self.num_sequences * self.depth
        tokens, confidence = self._numbers[-outputs:].tolist(), self._floats[-outputs:].tolist()
        rows = range(0, depth * width, width)
        return DraftResult(
            [tokens[row : row + width] for row in rows], [confidence[row : row + width] for row in rows], probs
        )


@dataclass(frozen=True)
class PrefillBuffers:
    """Positions to prefill in the library's layout: a record that holds only addresses into `numbers`."""

    record: array[int]
    numbers: array[int]


@dataclass(frozen=True)
class DraftOptions:
    """Optional inputs of a draft."""

    # For rows that are tree nodes: the slots of the last positions each one attends to, the same number for all rows
    # and its own slot last.
    tree_slots: list[list[int]] | None = None
    draws: bytes | None = None  # sampling parameters, a SAMPLING_ROW for each depth and sequence; None: argmax
    returns_probs: bool = False
    prefill: PrefillBuffers | None = None  # prefilled in the same call, by heads that condition on tokens only


NO_OPTIONS = DraftOptions()


class NativeHead:
    """A head's layers over its keys and values in the KV cache, [pages, page_size, kv_heads, stored width] each."""

    def __init__(self, native: Library, head: DraftHead[Any], keys: list[Tensor], values: list[Tensor]) -> None:
        self.library, self.head = native, head
        self._vocab, self._width = head.config.outputs, head.config.layer.width
        own = [layer for layer in head.modules() if isinstance(layer, HeadLayer)]
        layers = [self._layer(layer, *pair) for layer, *pair in zip(own, keys, values, strict=True)]
        self._layers = (LayerRecord * len(layers))(*layers)
        self._embed = head.embedding.contiguous()
        self._ids = head.draft_ids.contiguous()
        self._held = (keys, values, head.rope_table)  # kept alive: the records hold only addresses
        self.page_size = keys[0].shape[1]
        self.record = self._head_record()

    def _layer(self, layer: HeadLayer, keys: Tensor, values: Tensor) -> LayerRecord:
        attention = layer.attention
        linears = (attention.qkv, attention.out, layer.ffn.gate_up, layer.ffn.down)
        norms = (layer.attention_norm, layer.ffn_norm, attention.q_norm, attention.k_norm)
        return LayerRecord(
            *(weights_address(linear) for linear in linears),
            *(norm_address(norm) for norm in norms),
            None,
            None,
            self.head.rope_table.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            self.head.config.layer.window or 0,
        )

    def _head_record(self) -> HeadRecord:
        head, layer = self.head, self.head.config.layer
        config: Any = head.config
        third = getattr(config, "generation", 0) == 3
        output = head.output.native
        assert output is not None, "native_for_head has checked"
        return HeadRecord(
            ctypes.addressof(self._layers),
            None if third else weights_address(getattr(head, "fc", None)),
            output.address,
            self._embed.data_ptr(),
            norm_address(getattr(head, "embed_norm", None)),
            norm_address(getattr(head, "feature_norm", None)),
            norm_address(getattr(head, "norm", None)),
            None if config.draft_vocab is None else self._ids.data_ptr(),
            config.layers,
            layer.width,
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            layer.ffn,
            self.page_size,
            layer.norm_eps,
            layer.scale,
            config.embed_scale,
            layer.activation == "gelu_tanh",
            output.level,
            third,
            (2 if config.norm_before_residual else 1) if third else 0,
            getattr(config, "norm_output", False),
            KV_TYPES.index(self._held[0][0].dtype),
        )


class NativeChain(NativeHead):
    """Drafts with autoregressive heads, one token after another."""

    def draft(
        self, request: DraftRequest, hidden_states: Tensor | None, options: DraftOptions = NO_OPTIONS
    ) -> DraftResult:
        """Draft a chain for each sequence, argmax or sampled.

        `hidden_states` [sequences, width] of the previous positions are overwritten; None for a head that conditions
        on tokens only.
        """
        for position, depth, pages in zip(request.positions, request.depths, request.pages, strict=True):
            require(position + depth <= len(pages) * self.page_size, "pages for all draft tokens of a sequence")
        buffers = DraftBuffers(request, max(request.depths))
        probs = None
        if options.returns_probs:
            probs = torch.zeros(buffers.num_sequences, buffers.depth, self.head.config.vocab)
        return buffers.result(self._run(buffers, hidden_states, options, probs=probs), probs)

    def step(self, request: DraftRequest, hidden_states: Tensor, options: DraftOptions = NO_OPTIONS) -> Tensor:
        """Return the logits [rows, outputs] of one step; `hidden_states` become those of this step."""
        logits = torch.empty(len(request.tokens), self._vocab)
        self._run(DraftBuffers(request, 0), hidden_states, options, logits)
        return logits

    def _run(
        self,
        buffers: DraftBuffers,
        hidden_states: Tensor | None,
        options: DraftOptions,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
    ) -> int:
        """Return the length of the longest draft; `logits` and `probs` are written if given."""
        is_plain = hidden_states is None or (hidden_states.is_contiguous() and hidden_states.dtype == torch.float32)
        require(is_plain, "contiguous float32 hidden states")
        slots = None if options.tree_slots is None else array("q", chain.from_iterable(options.tree_slots))
        tree = (None, 0) if slots is None else (slots.buffer_info()[0], len(slots) // buffers.num_sequences)
        draws = None if options.draws is None else array("b", options.draws)
        num_draws = buffers.num_sequences * max(buffers.depth, 1)
        require(
            draws is None or len(draws) == num_draws * SAMPLING_ROW.itemsize, "one SAMPLING_ROW for each draft token"
        )
        record = pack_record(
            DraftChainRecord,
            *buffers.inputs,
            _address(hidden_states),
            _address(logits),
            *buffers.outputs,
            buffers.num_sequences,
            buffers.depth,
            *tree,
            None if draws is None else draws.buffer_info()[0],
            _address(probs),
            self.head.config.vocab,
            None if options.prefill is None else options.prefill.record.buffer_info()[0],
        )
        return self.library.draft_chain(self.record, record)


class NativeBlock(NativeHead):
    """Drafts with block heads, a block of tokens in one forward pass."""

    def __init__(self, native: Library, head: BlockHead, keys: list[Tensor], values: list[Tensor], pages: int) -> None:
        """The slots after the first `pages` pages hold the keys and values of blocks."""
        super().__init__(native, head, keys, values)
        config = head.config
        self.max_sequences = (len(keys[0]) - pages) * keys[0].shape[1] // config.block  # at once
        self.record.fc = self.record.hidden_norm = None  # they apply to hidden states, not to the rows of a block
        self._masks = head.mask_embeddings.expand(config.block - 1, -1).contiguous()
        self._markov = None if head.markov_in is None else head.markov_in.data.contiguous()
        self._confidence = head.confidence_weights
        with_markov = config.confidence and config.confidence_with_markov
        self._block = BlockHeadRecord(
            self.record,
            self._masks.data_ptr(),
            None if self._markov is None else self._markov.data_ptr(),
            weights_address(head.markov_out),
            None if self._confidence is None else self._confidence[0].data_ptr(),
            0.0 if self._confidence is None else self._confidence[1],
            config.markov_rank if with_markov else 0,
            config.markov_rank,
            config.block,
            config.sample_from_anchor,
            config.causal_in_block,
            config.anchored,
            pages * keys[0].shape[1],
        )

    def draft(self, request: DraftRequest) -> DraftResult:
        """Draft the argmax tokens, each conditioned on the one before it by the Markov head."""
        buffers = DraftBuffers(request, min(max(request.depths), self._block_drafts))
        return buffers.result(self._run(buffers, buffers.depth)[0])

    def states(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return normed states [sequences, block, width] and logits [sequences, depth, outputs], no Markov bias."""
        return self._run(DraftBuffers(request, 0), min(max(request.depths), self._block_drafts))[1:]

    @property
    def _block_drafts(self) -> int:
        drafts: int = self.head.config.drafts
        return drafts

    def _run(self, buffers: DraftBuffers, depth: int) -> tuple[int, Tensor, Tensor]:
        require(buffers.num_sequences <= self.max_sequences, "a spare block of KV slots for each sequence")
        states = torch.empty(buffers.num_sequences, self.head.config.block, self._width)
        logits = torch.empty(buffers.num_sequences, depth, self._vocab)
        record = BlockDraftRecord(
            *buffers.inputs, states.data_ptr(), logits.data_ptr(), *buffers.outputs, buffers.num_sequences, depth
        )
        return self.library.draft_blocks(self._block, record), states, logits


def native_for_head(head: DraftHead[Any]) -> Library | None:
    """Return the native library if it supports all layers of the head and the head is on the CPU in float32."""
    native = library()
    if native is None or head.like.device.type != "cpu" or head.like.dtype != torch.float32:
        return None
    wide = (module for module in head.modules() if isinstance(module, Linear) and module.outputs > 1)
    packed = all(module.native is not None for module in wide)
    joint = all(layer.attention.qkv is not None for layer in head.modules() if isinstance(layer, HeadLayer))
    return native if packed and joint and head.embedding.dtype == torch.float32 else None


def weights_address(layer: Linear | None) -> int | None:
    return None if layer is None or layer.native is None else layer.native.address


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def norm_address(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


class NativeMedusa:
    """Drafts with Medusa heads, one head per position."""

    def __init__(self, native: Library, head: MedusaHead) -> None:
        self._native, self._outputs = native, head.config.outputs
        blocks = [block for blocks in head.blocks for block in blocks.modules() if isinstance(block, Linear)]
        outputs = [each for each in head.outputs if isinstance(each, Linear)] or [head.output]
        self._blocks, self._outputs_table = _table(blocks), _table(outputs)
        self._held = (head, head.draft_ids.contiguous())
        level = outputs[0].native
        assert level is not None, "native_for_head has checked"
        self._record = MedusaRecord(
            ctypes.addressof(self._blocks),
            ctypes.addressof(self._outputs_table),
            None if head.target_norm is None or not head.config.target_norm else head.target_norm.data_ptr(),
            None if head.config.draft_vocab is None else self._held[1].data_ptr(),
            head.config.layers,
            head.config.layer.width,
            head.target_norm_eps,
            level.level,
            len(outputs) == 1,
        )

    def draft(self, hidden_states: Tensor, depth: int) -> DraftResult:
        """Draft the argmax tokens; `hidden_states` [sequences, width] are the target's last ones."""
        tokens = np.empty((depth, len(hidden_states)), np.int64)
        confidence = np.empty((depth, len(hidden_states)), np.float32)
        self._run(hidden_states, depth, (tokens.ctypes.data, confidence.ctypes.data))
        return DraftResult(tokens.tolist(), confidence.tolist())

    def logits(self, hidden_states: Tensor, depth: int) -> Tensor:
        """Return logits [depth, sequences, outputs]."""
        return self._run(hidden_states, depth, (None, None))

    def _run(self, hidden_states: Tensor, depth: int, out: tuple[int | None, int | None]) -> Tensor:
        require(
            hidden_states.is_contiguous() and hidden_states.dtype == torch.float32, "contiguous float32 hidden states"
        )
        logits = torch.empty(depth, len(hidden_states), self._outputs)
        rows = MedusaDraftRecord(hidden_states.data_ptr(), logits.data_ptr(), *out, len(hidden_states), depth)
        self._native.draft_medusa(self._record, rows)
        return logits


def _table(layers: list[Linear]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(layers))(*(weights_address(layer) for layer in layers))
