"""A model that is resolved and not loaded: its config, tokenizer, device, data type and memory needs."""

from __future__ import annotations

import os
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
from foretell.models.decoder import Decoder, kv_shapes
from foretell.models.fast_paths import missing_fast_path
from foretell.models.hf_config import read_config
from foretell.models.load import choose_dtype, fits_int4, load_model, materialize, meta_model
from foretell.models.packed_weights_cache import PackedWeightsCache
from foretell.models.quantize import (
    native_for,
    prepared_bytes,
    quantize_weights,
    quantized_bytes,
)
from foretell.models.rope_scaling import scaled_config
from foretell.models.sharding import Shard
from foretell.runner.cuda.graph_shapes import CAPTURE_ROWS
from foretell.runner.cuda.warmup import DUMMY_WEIGHT, BackgroundWarmup, HeadWarmup, one_layer_per_kind
from foretell.runner.memory_plan import graph_workspace, step_workspace
from foretell.runner.model_runner import ModelRunner
from foretell.tensor_parallel import ModelShardSpec, TensorParallelGroup
from foretell.tokenizer import Tokenizer

Progress = Callable[[str], None]  # called with lines for the user


def no_progress(_: str) -> None:
    """Ignore a progress message; for callers that print none."""


def print_progress(line: str) -> None:
    """Print a progress message on standard error; standard output is for results."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ModelSource:
    """A model that is resolved and not loaded yet."""

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    quantization: QuantFormat | None = None  # of the linear layers; None: floats
    shard: Shard | None = None  # of a tensor-parallel model, the shard of this process
    keep_packed: bool = False  # cache packed weights on disk for the next start
    kv_cache_dtype: torch.dtype | None = None  # of keys and values; None: `dtype`

    @property
    def local_config(self) -> ModelConfig:
        """Return the config of this process's shard."""
        return self.config if self.shard is None else self.shard.local_config(self.config)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Return the data type of keys and values in the KV cache."""
        return self.kv_cache_dtype or self.dtype

    @cached_property
    def weight_bytes(self) -> int:
        return prepared_bytes(self.local_config, self.dtype, self.device, self.quantization)

    @property
    def cpu_quantization(self) -> QuantFormat | None:
        """Return the format of weights packed for the CPU; None for floats and on a CUDA device."""
        return self.quantization if self.device.type == "cpu" else None

    @cached_property
    def loading_bytes(self) -> int:
        """Return the bytes of the float weights while they are quantized; 0 where they stay in floats."""
        return 0 if self.quantization is None else prepared_bytes(self.local_config, self.dtype, "meta")

    @property
    def token_bytes(self) -> int:
        """Return the bytes of KV cache per token."""
        return sum(shape.bytes_per_token(self.dtype, self.kv_dtype) for shape in kv_shapes(self.local_config))

    @property
    def padded_sizes(self) -> tuple[int, ...]:
        """Return the step sizes in rows that steps are padded to; empty if they are not padded."""
        return CAPTURE_ROWS if self.has_triton_executor(self.config.context) else ()

    def has_triton_executor(self, context: int) -> bool:
        """Return whether its steps run in Triton kernels when it is served with this context."""
        on_gpu = self.device.type == "cuda" and find_spec("triton") is not None
        return on_gpu and missing_fast_path(self.config, "cuda", context) is None

    def step_workspace(self, tokens: int, context: int) -> int:
        """Return the workspace of its steps on a GPU, including captured ones."""
        c, vocab, itemsize = self.local_config, self.config.vocab, self.dtype.itemsize
        width = 3 * c.width + 3 * c.ffn + (2 * c.heads + 2 * c.kv_heads) * c.head_dim
        captured = graph_workspace(c.heads * c.head_dim, min(context, c.context), vocab, itemsize)
        return step_workspace(width, tokens, vocab, itemsize) + captured

    def load(self, workers: TensorParallelGroup | None = None) -> Decoder:
        """Load the weights, or the first rank's shard, and join it to the other ranks."""
        model = load_model(self.checkpoint, self.dtype, self.device, self.shard)
        if workers is not None and self.shard is not None:
            model.join_ranks(workers.group)
        return model

    def load_packed(self, workers: TensorParallelGroup | None = None) -> Decoder:
        """Load packed weights from the disk cache, or as `load` if it has none; for callers without need of floats."""
        cache = self._packed_cache
        return (None if cache is None else cache.load()) or self.load(workers)

    @property
    def _packed_cache(self) -> PackedWeightsCache | None:
        """Return the disk cache of its packed weights, if it has one."""
        is_packable = self.shard is None and self.dtype == torch.float32
        if not self.keep_packed or not is_packable or native_for(self.device) is None:
            return None
        return PackedWeightsCache(self.checkpoint, self.config, self.quantization)

    def shard_spec(self, cache_size: CacheSize, heads: tuple[Path | None, ...] = ()) -> ModelShardSpec:
        """Return what the other ranks load: their shards of the model and its heads, and the size of the KV cache."""
        context = min(cache_size.context, self.config.context)
        return ModelShardSpec(
            self.checkpoint.path,
            self.dtype,
            self.quantization,
            cache_size.pages,
            cache_size.page_size,
            context,
            heads,
            self.kv_dtype,
        )

    def quantize(self, model: Decoder) -> Decoder:
        """Return the loaded model with its weights as they will run. A quantized draft copy is made before this."""
        if model.is_packed:
            return model
        return model if self.quantization is None else quantize_weights(model, self.quantization)

    def make_runner(
        self,
        model: Decoder,
        cache_size: CacheSize,
        hidden_layers: tuple[int, ...] = (),
        extra_layers: tuple[LayerShape, ...] = (),
    ) -> ModelRunner:
        """Return a runner for the loaded model; `extra_layers` are further layers of its KV cache."""
        context, is_new = min(cache_size.context, self.config.context), not model.is_packed
        runner = ModelRunner(
            self.quantize(model),
            cache_size.pages,
            cache_size.page_size,
            context,
            hidden_layers,
            extra_layers,
            self.kv_dtype,
        )
        if is_new and (cache := self._packed_cache) is not None:
            cache.write(runner.model)
        return runner

    def background_warmup(
        self, cache_size: CacheSize, free: int, has_drafts: bool, heads: HeadWarmup | None = None
    ) -> AbstractContextManager[object]:
        """Compile kernels in the background while weights load, on a CUDA device whose `free` bytes allow it."""
        dummy_config, context = one_layer_per_kind(self.local_config), min(cache_size.context, self.config.context)
        needed = (
            prepared_bytes(dummy_config, self.dtype, "meta")
            + cache_size.context * self.token_bytes // self.config.layers
        )
        if not self.has_triton_executor(context) or self.shard is not None or 2 * needed > free:
            return nullcontext()

        def make() -> ModelRunner:
            model = materialize(meta_model(dummy_config, self.dtype), self.device)
            for weight in model.parameters():
                weight.fill_(DUMMY_WEIGHT)
            if heads is not None:
                heads.share_weights(model, context)
            model = model if self.quantization is None else quantize_weights(model, self.quantization)
            pages = -(-context // cache_size.page_size)  # page tables as wide as the real ones
            hidden_layers, extra_layers = ((), ()) if heads is None else ((0, model.config.layers), heads.extra_layers)
            return ModelRunner(model, pages, cache_size.page_size, context, hidden_layers, extra_layers)

        return BackgroundWarmup(make, self.device, has_drafts, heads)

    def copy_bytes(self, format: QuantFormat) -> int:
        """Return the bytes of a quantized copy of its weights."""
        return quantized_bytes(self.local_config, format, self.dtype, self.device)


@dataclass(frozen=True)
class CacheSize:
    """The size of a KV cache, and the longest sequence in it."""

    pages: int
    page_size: int  # tokens
    context: int  # tokens


def open_model(name: str, config: EngineConfig, say: Progress, ranks: int = 1) -> ModelSource:
    """Resolve a model and read its config; with several ranks, for the first of them."""
    template = read_chat_template(config.chat_template)
    checkpoint = open_checkpoint(resolve(name, say, config.revision))
    model_config = read_config(checkpoint)
    if config.rope_scaling is not None:
        trained, model_config = model_config.context, scaled_config(model_config, config.rope_scaling)
        say(
            f"{name}: --rope-scaling {config.rope_scaling} extends the context from {trained} tokens to "
            f"{model_config.context}; the model was not trained for it, so its output may be worse"
        )
    device = choose_device(config.device)
    dtype = choose_dtype(checkpoint, config.dtype, device)
    quantization = choose_quantization(config, checkpoint, device)
    shard = None if ranks == 1 else Shard(0, ranks)
    tokenizer = read_tokenizer(checkpoint, template)
    kv_cache_dtype = choose_kv_cache_dtype(config, dtype, device)
    return ModelSource(
        checkpoint,
        model_config,
        tokenizer,
        dtype,
        device,
        quantization,
        shard,
        keep_packed=config.keep_packed,
        kv_cache_dtype=kv_cache_dtype,
    )


def choose_kv_cache_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the data type of keys and values; None for that of the model."""
    wanted = None if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
    if wanted not in (None, dtype) and device.type != "cpu":
        used = str(dtype).removeprefix("torch.")
        raise RequestError(
            "kv_cache_dtype", f"{config.kv_cache_dtype} runs on a CPU only here; take auto, which is {used} (--dtype)"
        )
    return wanted


def choose_quantization(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> QuantFormat | None:
    """Return the format of the linear layers; None for floats.

    `auto` is for a CPU and a checkpoint that is quantized itself, unless the config names a dtype: int4 if that holds
    the weights of all layers with no more error than that of its scales, else int8.
    """
    on_cpu, wanted = device.type == "cpu", config.quantization
    if wanted == "fp8" and on_cpu:
        raise RequestError("quantization", "fp8 runs on a CUDA device only; on a CPU take int8 or int4")
    if wanted == "int4" and not on_cpu:
        raise RequestError("quantization", "int4 runs on a CPU only; take int8 or fp8, or set device to cpu")
    if wanted == "auto":
        fast = on_cpu and config.dtype == "auto" and native_for(device) is not None
        if not fast or checkpoint.quantization is None:
            return None
        return "int4" if fits_int4(checkpoint) else "int8"
    formats: dict[str, QuantFormat] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
    return formats.get(wanted)


def describe_quantization(config: EngineConfig, source: ModelSource) -> str:
    """Return a line for the user on how the weights are stored and run; empty if both are floats."""
    stored, runs = source.checkpoint.quantization, source.quantization or str(source.dtype).removeprefix("torch.")
    line = f"{config.model}: quantization: {runs if stored is None else f'{stored} -> {runs}'}"
    if source.quantization is None:
        return "" if stored is None else f"{line}, decoded at load: no kernel runs it as stored"
    if source.device.type != "cpu":
        line += ", weights and activations, one scale per row"
    elif not native_for(source.device):
        line += ", run in floats: no native kernels"
    return f"{line}; --quantization none is exact" if config.quantization == "auto" else line


def describe_executor(config: EngineConfig, source: ModelSource, context: int) -> str:
    """Return a line for the user if the model runs in torch for want of kernels; empty if it does not."""
    missing = missing_fast_path(source.config, source.device.type, context)
    kernel = "native" if source.device.type == "cpu" else "Triton"
    return f"{config.model}: runs in torch, which is slower: no {kernel} kernel for {missing}" if missing else ""


def choose_device(name: str, field: str = "device") -> torch.device:
    """Return the device of this name; raise if it is not available. `field` is the setting that names it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise RequestError(field, f"{name!r} is not known; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(field, "no CUDA device is available; use cpu")
    return device


def read_tokenizer(checkpoint: Checkpoint, chat_template: str | None = None) -> Tokenizer:
    """Return the tokenizer of a checkpoint, with another chat template if one is given."""
    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf(checkpoint.config, chat_template)
    return Tokenizer.from_files(checkpoint.tokenizer_files, chat_template)


def read_chat_template(given: str | None) -> str | None:
    """Return a chat template given as a file or as itself."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(os.path.expanduser(given)).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RequestError("chat_template", f"{given} is not UTF-8 text") from None
    except OSError as error:
        reason = f"{given} cannot be read: {error.strerror}; name a Jinja file, or give the template itself"
        raise RequestError("chat_template", reason) from None
