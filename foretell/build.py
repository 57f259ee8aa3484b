"""Where the parts are put together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import draft
from .config import EngineConfig, SpeculationConfig
from .control.controller import FixedController
from .draft.base import Drafter
from .engine.engine import Engine
from .engine.requests import Limits, RequestMaker, check_rule
from .engine.scheduler import Scheduler
from .errors import RequestError
from .hub import Checkpoint, open_checkpoint, resolve
from .kv.cache import LayerShape
from .kv.prefix import PrefixIndex
from .models.config import ModelConfig
from .models.load import choose_dtype, load_model, weight_bytes
from .models.read_config import end_ids, read_config, sampling_defaults
from .runner.memory import MemoryPlan, Needs, device_memory, plan_memory
from .runner.runner import ModelRunner
from .sampling.grammar import GrammarCompiler
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Assembly:
    """An engine and what a caller needs to talk to it."""

    engine: Engine
    tokenizer: Tokenizer
    requests: RequestMaker
    grammars: GrammarCompiler
    memory: MemoryPlan
    sampling_defaults: dict[str, Any]


def say_nothing(_: str) -> None:
    """For callers who want no progress shown."""


def say_on_stderr(line: str) -> None:
    """Standard output belongs to results."""
    print(line, file=sys.stderr, flush=True)


def build_engine(
    config: EngineConfig,
    speculation: SpeculationConfig,
    drafter: Drafter | None = None,
    say: Callable[[str], None] = say_nothing,
) -> Assembly:
    """Find the model, count the memory, load it, and make the loop. `drafter` overrides the config's."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # Wrong names fail before a long load.
    check_rule(speculation.rule)
    drafter = drafter if drafter is not None else draft.build(speculation)
    checkpoint = open_checkpoint(resolve(config.model, say))
    model_config = read_config(checkpoint)
    context = _context(config, model_config)
    device = choose_device(config.device)
    dtype = choose_dtype(checkpoint, config.dtype, device)
    tokenizer = read_tokenizer(checkpoint)
    needs = Needs(
        weight_bytes(model_config, dtype, device),
        drafter.memory,
        config.page_size * _token_bytes(model_config, dtype),
        config.page_size,
        context,
        config.max_num_seqs,
    )
    memory = plan_memory(needs, device_memory(device), config.kv_memory)
    model = load_model(checkpoint, dtype, device)
    runner = ModelRunner(model, memory.pages, config.page_size, context, drafter.taps)
    prefix = PrefixIndex(runner.pool) if config.prefix_cache else None
    scheduler = Scheduler(runner, prefix, config.max_num_seqs, config.max_num_batched_tokens)
    engine = Engine(runner, drafter, FixedController(speculation.budget), scheduler, tokenizer)
    limits = Limits(context, tokenizer.end_ids | end_ids(checkpoint), model_config.vocab)
    requests = RequestMaker(limits, tokenizer, drafter, speculation.rule)
    grammars = GrammarCompiler(tokenizer, model_config.vocab)
    return Assembly(engine, tokenizer, requests, grammars, memory, sampling_defaults(checkpoint))


def choose_device(name: str) -> torch.device:
    """The device of that name, if it is here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise RequestError("device", f"{name!r} is not known; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError("device", "no CUDA device is here; use cpu")
    return device


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with the model."""
    if checkpoint.kind == "gguf":
        return Tokenizer.from_gguf(checkpoint.config)
    return Tokenizer.from_files(checkpoint.tokenizer_files)


def _context(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > model.context:
        raise RequestError("max_model_len", f"{wanted} is more than the model's {model.context}")
    return model.context if wanted is None else wanted


def _token_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of cache one token takes."""
    return model.layers * LayerShape(model.kv_heads, model.head_dim).bytes_per_token(dtype)
