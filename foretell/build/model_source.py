"""Finding a model and reading what it is made of, before a long load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch

from foretell.config import EngineConfig
from foretell.errors import RequestError
from foretell.hub import Checkpoint, open_checkpoint, resolve
from foretell.kernels.quant import QuantFormat
from foretell.kv.cache import LayerShape
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.hf_config import read_config
from foretell.models.load import choose_dtype, is_quantized, load_model, materialize, meta_model
from foretell.models.packed_weights_cache import PackedWeightsCache
from foretell.models.quantize import (
    Bits,
    native_for,
    prepared_bytes,
    quantize_weights,
    quantize_weights_cuda,
    quantized_bytes,
)
from foretell.models.sharding import Shard
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS
from foretell.runner.cuda.warmup import DUMMY_WEIGHT, BackgroundWarmup, HeadWarmup, one_layer_per_kind
from foretell.runner.memory_plan import graph_workspace, step_workspace
from foretell.runner.model_runner import ModelRunner
from foretell.tensor_parallel import ModelShardSpec, TensorParallelGroup
from foretell.tokenizer import Tokenizer


def no_progress(_: str) -> None:
    """For callers who want no progress shown."""


def print_progress(line: str) -> None:
    """Standard output belongs to results."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ModelSource:
    """A model that was looked at and not yet loaded."""

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    bits: Bits | None = None  # of a weight, where they are to be integers
    rounding: QuantFormat | None = None  # of weights and rows, on a CUDA device
    shard: Shard | None = None  # of a model that is split, the part that is loaded here
    keep_packed: bool = False  # whether packed weights are kept on disk for the next start

    @property
    def local_config(self) -> ModelConfig:
        """What lies here."""
        return self.config if self.shard is None else self.shard.local_config(self.config)

    @cached_property
    def weight_bytes(self) -> int:
        return prepared_bytes(self.local_config, self.dtype, self.device, self.bits, self.rounding)

    @cached_property
    def loading_bytes(self) -> int:
        """What its weights take in floats, before they are rounded."""
        rounded = self.bits is not None or self.rounding is not None
        return prepared_bytes(self.local_config, self.dtype, "meta") if rounded else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of cache one token takes."""
        layer = LayerShape(self.local_config.kv_heads, self.config.head_dim)
        return self.config.layers * layer.bytes_per_token(self.dtype)

    @property
    def padded_sizes(self) -> tuple[int, ...]:
        """The rows that its steps are filled up to; none where they run as they are."""
        return CAPTURE_ROWS if self.device.type == "cuda" and find_spec("triton") is not None else ()

    def step_workspace(self, tokens: int, context: int) -> int:
        """What its steps work with on a GPU, recorded ones and others."""
        c, vocab, itemsize = self.local_config, self.config.vocab, self.dtype.itemsize
        width = 3 * c.width + 3 * c.ffn + (2 * c.heads + 2 * c.kv_heads) * c.head_dim
        recorded = graph_workspace(c.heads * c.head_dim, min(context, c.context), vocab, itemsize)
        return step_workspace(width, tokens, vocab, itemsize) + recorded

    def load(self, team: TensorParallelGroup | None = None) -> Decoder:
        """Its weights, or the first rank's part of them, and what joins it to the others."""
        model = load_model(self.checkpoint, self.dtype, self.device, self.shard)
        if team is not None and self.shard is not None:
            model.join_ranks(team.group)
        return model

    def load_packed(self, team: TensorParallelGroup | None = None) -> Decoder:
        """As `load`, for those who need no floats: where packed weights were kept, they are taken as they are."""
        kept = self._kept
        return (None if kept is None else kept.load()) or self.load(team)

    @property
    def _kept(self) -> PackedWeightsCache | None:
        """Where its packed weights are kept."""
        whole = self.shard is None and self.dtype == torch.float32
        if not self.keep_packed or not whole or native_for(self.device) is None:
            return None
        return PackedWeightsCache(self.checkpoint, self.config, self.bits)

    def shard_spec(self, room: CacheSize, heads: tuple[Path | None, ...] = ()) -> ModelShardSpec:
        """What other ranks are to load of a model that is split, and of heads with it, and the room they give it."""
        context = min(room.context, self.config.context)
        ways = (self.dtype, self.bits, self.rounding)
        return ModelShardSpec(self.checkpoint.path, *ways, room.pages, room.page_size, context, heads)

    def quantize(self, model: Decoder) -> Decoder:
        """The loaded model with its weights as they will run; a copy in integers is made before this."""
        if model.is_packed:
            return model
        if self.rounding is not None:
            return quantize_weights_cuda(model, self.rounding)
        return model if self.bits is None else quantize_weights(model, self.bits)

    def make_runner(
        self, model: Decoder, room: CacheSize, taps: tuple[int, ...] = (), beside: tuple[LayerShape, ...] = ()
    ) -> ModelRunner:
        """What runs it, once it is loaded; `beside` are further layers of its cache."""
        context, made_now = min(room.context, self.config.context), not model.is_packed
        runner = ModelRunner(self.quantize(model), room.pages, room.page_size, context, taps, beside)
        if made_now and (kept := self._kept) is not None:
            kept.write(runner.model)
        return runner

    def background_warmup(
        self, room: CacheSize, free: int, guesses: bool, heads: HeadWarmup | None = None
    ) -> AbstractContextManager[object]:
        """Gets kernels ready beside the load, where there are any and that leaves memory for it: `free` bytes."""
        few, context = one_layer_per_kind(self.local_config), min(room.context, self.config.context)
        needed = prepared_bytes(few, self.dtype, "meta") + room.context * self.token_bytes // self.config.layers
        if self.device.type != "cuda" or find_spec("triton") is None or self.shard is not None or 2 * needed > free:
            return nullcontext()

        def make() -> ModelRunner:
            model = materialize(meta_model(few, self.dtype), self.device)
            for weight in model.parameters():
                weight.fill_(DUMMY_WEIGHT)
            if heads is not None:
                heads.share_weights(model, context)
            model = model if self.rounding is None else quantize_weights_cuda(model, self.rounding)
            pages = -(-context // room.page_size)  # as many as the tables of the real one are wide
            ways = ((), ()) if heads is None else ((0, model.config.layers), heads.extra_layers)
            return ModelRunner(model, pages, room.page_size, context, *ways)

        return BackgroundWarmup(make, self.device, guesses, heads)

    def copy_bytes(self, bits: Bits) -> int:
        """What its weights take again in so many bits."""
        return quantized_bytes(self.local_config, bits, self.dtype, self.device)


@dataclass(frozen=True)
class CacheSize:
    """Pages of the cache, and the longest text in them."""

    pages: int
    page_size: int
    context: int


def open_model(name: str, config: EngineConfig, say: Callable[[str], None], ranks: int = 1) -> ModelSource:
    """Find a model and read what it is made of; with several ranks, for the first of them."""
    checkpoint = open_checkpoint(resolve(name, say, config.revision))
    model_config = read_config(checkpoint)
    device = choose_device(config.device)
    dtype = choose_dtype(checkpoint, config.dtype, device)
    rounding = choose_rounding(config, device)
    bits = choose_bits(config, checkpoint, device)
    if rounding is not None:
        say(f"{name}: weights in {rounding}, each output by its own largest, and rows likewise")
    if bits is not None:
        own = " as its file's own are; quantization none is float32" if config.quantization == "auto" else ""
        said = own if native_for(device) else ", run as floats: no native kernels"
        say(f"{name}: weights rounded to int{bits}{said}")
    shard = None if ranks == 1 else Shard(0, ranks)
    tokenizer = read_tokenizer(checkpoint)
    return ModelSource(checkpoint, model_config, tokenizer, dtype, device, bits, rounding, shard, config.keep_packed)


def choose_bits(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> Bits | None:
    """Of a weight; None for floats. Who names a float type gets it."""
    if config.quantization == "auto":
        fast = device.type == "cpu" and config.dtype == "auto" and native_for(device) is not None
        return 8 if fast and is_quantized(checkpoint) else None
    if config.quantization == "none" or device.type != "cpu":
        return None
    return 8 if config.quantization == "int8" else 4


def choose_rounding(config: EngineConfig, device: torch.device) -> QuantFormat | None:
    """In what a CUDA device has weights and rows; None for floats, and on a CPU, which has ways of its own."""
    on_cpu, wanted = device.type == "cpu", config.quantization
    if wanted == "fp8" and on_cpu:
        raise RequestError("quantization", "fp8 runs on a CUDA device only; on a CPU take int8 or int4")
    if wanted == "int4" and not on_cpu:
        raise RequestError("quantization", "int4 runs on a CPU only; take int8 or fp8, or set device to cpu")
    if on_cpu or wanted not in ("int8", "fp8"):
        return None
    return "int8" if wanted == "int8" else "fp8"


def choose_device(name: str, field: str = "device") -> torch.device:
    """The device of that name, if it is here; `field` is the setting it was named in."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise RequestError(field, f"{name!r} is not known; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(field, "no CUDA device is here; use cpu")
    return device


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with the model."""
    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf(checkpoint.config)
    return Tokenizer.from_files(checkpoint.tokenizer_files)
