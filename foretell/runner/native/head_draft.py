"""Guesses of a head in one call of the native library: on a CPU in float32. The definition is the head's own `step`."""

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
from foretell.runner.native.executor import in_a_row


@dataclass(frozen=True)
class DraftRequest:
    """Texts to be guessed for: the last token of each, its place, its pages, the most guesses, the least chance."""

    tokens: list[int]
    places: list[int]
    pages: list[list[int]]
    depths: list[int]
    floors: list[float]


@dataclass(frozen=True)
class DraftResult:
    """Guesses and how sure each is, by depth and text."""

    tokens: list[list[int]]
    sure: list[list[float]]
    probs: Tensor | None = None  # [texts, depth, vocab]: what each was drawn from, where any was


class DraftBuffers:
    """What is asked as the library wants it, and room for `depth` guesses of each text behind it. Plain arrays: numpy's
    are dear to make, and dearer to find."""

    def __init__(self, asked: DraftRequest, depth: int) -> None:
        """Without room for guesses there is no address of it either."""
        self.texts, self.depth = len(asked.tokens), depth
        pages = list(chain.from_iterable(asked.pages))
        begins = list(accumulate(map(len, asked.pages[:-1]), initial=0))
        room = self.texts * depth
        self._numbers, places = in_a_row((asked.tokens, asked.places, pages, begins, asked.depths, [0] * room))
        self._floats = array("f", chain(asked.floors, repeat(0.0, room)))
        floors, _ = self._floats.buffer_info()
        self.asked = (*places[:-1], floors)
        self.out = (places[-1], floors + self._floats.itemsize * self.texts) if room else (None, None)

    def told(self, made: int, probs: Tensor | None = None) -> DraftResult:
        """What lies there now, of the depths that were made."""
        texts, room = self.texts, self.texts * self.depth
        tokens, sure = self._numbers[-room:].tolist(), self._floats[-room:].tolist()
        rows = range(0, made * texts, texts)
        return DraftResult(
            [tokens[row : row + texts] for row in rows], [sure[row : row + texts] for row in rows], probs
        )


@dataclass(frozen=True)
class PrefillBuffers:
    """Places to be read, as the library wants them: a ReadingRecord, which has addresses of these numbers only."""

    record: array[int]
    numbers: array[int]


@dataclass(frozen=True)
class TreeSlots:
    """What goes with a call: of rows that are nodes of trees the slots of the last places each sees, as many for all,
    its own the last of them; how guesses are drawn, a DRAW for each depth and text, and whether it is told what from;
    what is read first, by heads of tokens alone."""

    branches: list[list[int]] | None = None
    draws: bytes | None = None
    tells: bool = False
    along: PrefillBuffers | None = None


NOTHING = TreeSlots()


class NativeHead:
    """A head's layers over its keys and values in the cache, [pages, page_size, kv_heads, dim] each."""

    def __init__(self, native: Library, head: DraftHead[Any], keys: list[Tensor], values: list[Tensor]) -> None:
        self.library, self.head = native, head
        self._outputs, self._width = head.config.outputs, head.config.layer.width
        own = [layer for layer in head.modules() if isinstance(layer, HeadLayer)]
        layers = [self._layer(layer, *pair) for layer, *pair in zip(own, keys, values, strict=True)]
        self._layers = (LayerRecord * len(layers))(*layers)
        self._embed = head.embedding.contiguous()
        self._ids = head.draft_ids.contiguous()
        self._held = (keys, values, head.rope_table)  # the records have addresses only
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
        assert output is not None, "native_head looked"
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
        )


class NativeChain(NativeHead):
    """For heads that guess one token after another."""

    def guess(self, asked: DraftRequest, features: Tensor | None, beside: TreeSlots = NOTHING) -> DraftResult:
        """A token, again and again: the likeliest, or as `beside` says; `features` [texts, width] of the places before
        are written over, and None for a head that reads tokens alone."""
        for place, depth, pages in zip(asked.places, asked.depths, asked.pages, strict=True):
            require(place + depth <= len(pages) * self.page_size, "pages for all draft tokens of a sequence")
        desk = DraftBuffers(asked, max(asked.depths))
        probs = torch.zeros(desk.texts, desk.depth, self.head.config.vocab) if beside.tells else None
        return desk.told(self._run(desk, features, beside, probs=probs), probs)

    def step(self, asked: DraftRequest, features: Tensor, beside: TreeSlots = NOTHING) -> Tensor:
        """Logits [rows, outputs] of one guess; `features` become those behind it."""
        logits = torch.empty(len(asked.tokens), self._outputs)
        self._run(DraftBuffers(asked, 0), features, beside, logits)
        return logits

    def _run(
        self,
        desk: DraftBuffers,
        features: Tensor | None,
        beside: TreeSlots,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
    ) -> int:
        """How many guesses were made for the longest; `logits` and `probs` are filled where they are wanted."""
        usual = features is None or (features.is_contiguous() and features.dtype == torch.float32)
        require(usual, "contiguous float32 hidden states")
        places = (_address(features), _address(logits))
        own = None if beside.branches is None else array("q", chain.from_iterable(beside.branches))
        tree = (None, 0) if own is None else (own.buffer_info()[0], len(own) // desk.texts)
        draws = None if beside.draws is None else array("b", beside.draws)
        drawn_for = desk.texts * max(desk.depth, 1)
        require(draws is None or len(draws) == drawn_for * SAMPLING_ROW.itemsize, "one DRAW for each draft token")
        drawn = (None if draws is None else draws.buffer_info()[0], _address(probs), self.head.config.vocab)
        along = None if beside.along is None else beside.along.record.buffer_info()[0]
        sizes = (desk.texts, desk.depth)
        record = pack_record(DraftChainRecord, *desk.asked, *places, *desk.out, *sizes, *tree, *drawn, along)
        return self.library.draft_chain(self.record, record)


class NativeBlock(NativeHead):
    """For heads that guess a block at once."""

    def __init__(self, native: Library, head: BlockHead, keys: list[Tensor], values: list[Tensor], pages: int) -> None:
        """Behind `pages` pages there is room for the blocks' own keys and values."""
        super().__init__(native, head, keys, values)
        config = head.config
        self.most = (len(keys[0]) - pages) * keys[0].shape[1] // config.block  # texts at once
        self.record.fc = self.record.hidden_norm = None  # they apply to the context, not to the rows of a block
        self._masks = head.mask_embeddings.expand(config.block - 1, -1).contiguous()
        self._markov = None if head.markov_in is None else head.markov_in.data.contiguous()
        self._surety = head.confidence_weights
        with_markov = config.confidence and config.confidence_with_markov
        self._block = BlockHeadRecord(
            self.record,
            self._masks.data_ptr(),
            None if self._markov is None else self._markov.data_ptr(),
            weights_address(head.markov_out),
            None if self._surety is None else self._surety[0].data_ptr(),
            0.0 if self._surety is None else self._surety[1],
            config.markov_rank if with_markov else 0,
            config.markov_rank,
            config.block,
            config.sample_from_anchor,
            config.causal_in_block,
            config.anchored,
            pages * keys[0].shape[1],
        )

    def guess(self, asked: DraftRequest) -> DraftResult:
        """The likeliest tokens, each in view of the one before it."""
        desk = DraftBuffers(asked, min(max(asked.depths), self._block_drafts))
        return desk.told(self._run(desk, desk.depth)[0])

    def states(self, asked: DraftRequest) -> tuple[Tensor, Tensor]:
        """Normed states [texts, block, width] and logits [texts, depth, outputs], without what a Markov head adds."""
        return self._run(DraftBuffers(asked, 0), min(max(asked.depths), self._block_drafts))[1:]

    @property
    def _block_drafts(self) -> int:
        drafts: int = self.head.config.drafts
        return drafts

    def _run(self, desk: DraftBuffers, depth: int) -> tuple[int, Tensor, Tensor]:
        require(desk.texts <= self.most, "a spare block of KV slots for each sequence")
        states = torch.empty(desk.texts, self.head.config.block, self._width)
        logits = torch.empty(desk.texts, depth, self._outputs)
        record = BlockDraftRecord(*desk.asked, states.data_ptr(), logits.data_ptr(), *desk.out, desk.texts, depth)
        return self.library.draft_blocks(self._block, record), states, logits


def native_for_head(head: DraftHead[Any]) -> Library | None:
    """The library, where it has all of the head's layers and computes where they are."""
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
    """All places ahead at once."""

    def __init__(self, native: Library, head: MedusaHead) -> None:
        self._native, self._outputs = native, head.config.outputs
        blocks = [block for blocks in head.blocks for block in blocks.modules() if isinstance(block, Linear)]
        outputs = [each for each in head.outputs if isinstance(each, Linear)] or [head.output]
        self._blocks, self._tops = _table(blocks), _table(outputs)
        self._held = (head, head.draft_ids.contiguous())
        level = outputs[0].native
        assert level is not None, "native_for_head looked"
        self._record = MedusaRecord(
            ctypes.addressof(self._blocks),
            ctypes.addressof(self._tops),
            None if head.target_norm is None or not head.config.target_norm else head.target_norm.data_ptr(),
            None if head.config.draft_vocab is None else self._held[1].data_ptr(),
            head.config.layers,
            head.config.layer.width,
            head.target_norm_eps,
            level.level,
            len(outputs) == 1,
        )

    def guess(self, features: Tensor, depth: int) -> DraftResult:
        """The likeliest tokens; `features` [texts, width] are the target's last states."""
        guesses, sure = np.empty((depth, len(features)), np.int64), np.empty((depth, len(features)), np.float32)
        self._run(features, depth, (guesses.ctypes.data, sure.ctypes.data))
        return DraftResult(guesses.tolist(), sure.tolist())

    def logits(self, features: Tensor, depth: int) -> Tensor:
        """[depth, texts, outputs]."""
        return self._run(features, depth, (None, None))

    def _run(self, features: Tensor, depth: int, out: tuple[int | None, int | None]) -> Tensor:
        require(features.is_contiguous() and features.dtype == torch.float32, "contiguous float32 hidden states")
        logits = torch.empty(depth, len(features), self._outputs)
        rows = MedusaDraftRecord(features.data_ptr(), logits.data_ptr(), *out, len(features), depth)
        self._native.draft_medusa(self._record, rows)
        return logits


def _table(layers: list[Linear]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(layers))(*(weights_address(layer) for layer in layers))
