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
    native_for,
    prepared_bytes,
    quantize_weights,
    quantized_bytes,
)
from foretell.models.sharding import Shard
from foretell.runner.cuda.graph_shapes import ROWS
from foretell.runner.cuda.warmup import EVEN, BackgroundWarmup, DraftGraphs, few_layers
from foretell.runner.memory_plan import recorded_bytes, step_bytes
from foretell.runner.model_runner import ModelRunner
from foretell.tensor_parallel import ModelShardSpec, TensorParallelGroup
from foretell.tokenizer import Tokenizer


def say_nothing(_: str) -> None:
    """For callers who want no progress shown."""


def say_on_stderr(line: str) -> None:
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
    quantization: QuantFormat | None = None  # of the linear layers; None: floats
    shard: Shard | None = None  # of a model that is split, the part that is loaded here
    keeps: bool = False  # whether packed weights are kept on disk for the next start

    @property
    def local(self) -> ModelConfig:
        """What lies here."""
        return self.config if self.shard is None else self.shard.local_config(self.config)

    @cached_property
    def weights(self) -> int:
        return prepared_bytes(self.local, self.dtype, self.device, self.quantization)

    @property
    def cpu_quantization(self) -> QuantFormat | None:
        """Return the format of weights packed for the CPU; None for floats and on a CUDA device."""
        return self.quantization if self.device.type == "cpu" else None

    @cached_property
    def loading(self) -> int:
        """Return the bytes of the float weights while they are quantized; 0 where they stay in floats."""
        return 0 if self.quantization is None else prepared_bytes(self.local, self.dtype, "meta")

    @property
    def token_bytes(self) -> int:
        """Bytes of cache one token takes."""
        layer = LayerShape(self.local.kv_heads, self.config.head_dim)
        return self.config.layers * layer.bytes_per_token(self.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows that its steps are filled up to; none where they run as they are."""
        return ROWS if self.device.type == "cuda" and find_spec("triton") is not None else ()

    def step_bytes(self, tokens: int, context: int) -> int:
        """What its steps work with on a GPU, recorded ones and others."""
        c, vocab, itemsize = self.local, self.config.vocab, self.dtype.itemsize
        width = 3 * c.width + 3 * c.ffn + (2 * c.heads + 2 * c.kv_heads) * c.head_dim
        recorded = recorded_bytes(c.heads * c.head_dim, min(context, c.context), vocab, itemsize)
        return step_bytes(width, tokens, vocab, itemsize) + recorded

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
        if not self.keeps or not whole or native_for(self.device) is None:
            return None
        return PackedWeightsCache(self.checkpoint, self.config, self.quantization)

    def part(self, room: CacheSize, heads: tuple[Path | None, ...] = ()) -> ModelShardSpec:
        """What other ranks are to load of a model that is split, and of heads with it, and the room they give it."""
        context = min(room.context, self.config.context)
        return ModelShardSpec(
            self.checkpoint.path, self.dtype, self.quantization, room.pages, room.page_size, context, heads
        )

    def ready(self, model: Decoder) -> Decoder:
        """The loaded model with its weights as they will run; a copy in integers is made before this."""
        if model.is_packed:
            return model
        return model if self.quantization is None else quantize_weights(model, self.quantization)

    def runner(
        self, model: Decoder, room: CacheSize, taps: tuple[int, ...] = (), beside: tuple[LayerShape, ...] = ()
    ) -> ModelRunner:
        """What runs it, once it is loaded; `beside` are further layers of its cache."""
        context, made_now = min(room.context, self.config.context), not model.is_packed
        runner = ModelRunner(self.ready(model), room.pages, room.page_size, context, taps, beside)
        if made_now and (kept := self._kept) is not None:
            kept.write(runner.model)
        return runner

    def warming(
        self, room: CacheSize, free: int, guesses: bool, heads: DraftGraphs | None = None
    ) -> AbstractContextManager[object]:
        """Gets kernels ready beside the load, where there are any and that leaves memory for it: `free` bytes."""
        few, context = few_layers(self.local), min(room.context, self.config.context)
        needed = prepared_bytes(few, self.dtype, "meta") + room.context * self.token_bytes // self.config.layers
        if self.device.type != "cuda" or find_spec("triton") is None or self.shard is not None or 2 * needed > free:
            return nullcontext()

        def make() -> ModelRunner:
            model = materialize(meta_model(few, self.dtype), self.device)
            for weight in model.parameters():
                weight.fill_(EVEN)
            if heads is not None:
                heads.borrow(model, context)
            model = model if self.quantization is None else quantize_weights(model, self.quantization)
            pages = -(-context // room.page_size)  # as many as the tables of the real one are wide
            ways = ((), ()) if heads is None else ((0, model.config.layers), heads.beside)
            return ModelRunner(model, pages, room.page_size, context, *ways)

        return BackgroundWarmup(make, self.device, guesses, heads)

    def copy_bytes(self, format: QuantFormat) -> int:
        """Return the bytes of a quantized copy of its weights."""
        return quantized_bytes(self.local, format, self.dtype, self.device)


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
    quantization = choose_quantization(config, checkpoint, device)
    if quantization is not None and device.type != "cpu":
        say(f"{name}: weights and activations quantized to {quantization}, one scale per row")
    elif quantization is not None:
        own = " like those of its file; quantization none is float32" if config.quantization == "auto" else ""
        said = own if native_for(device) else ", run in floats: no native kernels"
        say(f"{name}: weights quantized to {quantization}{said}")
    shard = None if ranks == 1 else Shard(0, ranks)
    tokenizer = read_tokenizer(checkpoint)
    return ModelSource(checkpoint, model_config, tokenizer, dtype, device, quantization, shard, config.keep_packed)


def choose_quantization(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> QuantFormat | None:
    """Return the format of the linear layers; None for floats.

    `auto` is int8 on a CPU for a checkpoint that is quantized itself, unless the config names a dtype.
    """
    on_cpu, wanted = device.type == "cpu", config.quantization
    if wanted == "fp8" and on_cpu:
        raise RequestError("quantization", "fp8 runs on a CUDA device only; on a CPU take int8 or int4")
    if wanted == "int4" and not on_cpu:
        raise RequestError("quantization", "int4 runs on a CPU only; take int8 or fp8, or set device to cpu")
    if wanted == "auto":
        fast = on_cpu and config.dtype == "auto" and native_for(device) is not None
        return "int8" if fast and is_quantized(checkpoint) else None
    formats: dict[str, QuantFormat] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
    return formats.get(wanted)


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
