"""Resolves the models of a configuration, before any weights are loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretell import draft
from foretell.build.draft_compat import check_draft_compat
from foretell.build.draft_corpus import read_corpus_config
from foretell.build.draft_heads import DraftHeadSet, open_distilled, with_shipped_heads
from foretell.build.model_source import (
    CacheSize,
    ModelSource,
    Progress,
    choose_device,
    describe_executor,
    describe_quantization,
    open_model,
)
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft.base import Drafter
from foretell.draft.corpus.corpus import DraftCorpusConfig
from foretell.draft.cross_tokenizer.vocab_map import VocabMap
from foretell.engine.request_builder import check_rule
from foretell.errors import RequestError
from foretell.hub.checkpoint import GENERATION, Checkpoint, read_generation
from foretell.models.config import ModelConfig
from foretell.models.hf_config import sampling_defaults
from foretell.runner.memory_plan import MemoryPlan
from foretell.sampling_params import generation_overrides
from foretell.tensor_parallel import check_ranks
from foretell.utils.system import usable_cores

NO_GENERATION_CONFIG = "vllm"  # vLLM's word for sampling defaults that do not depend on the model


@dataclass(frozen=True)
class ResolvedModels:
    """The models of an engine, resolved and not loaded."""

    config: EngineConfig
    speculation: SpeculationConfig
    target: ModelSource
    draft_models: dict[str, ModelSource]  # by name
    vocab_maps: dict[str, VocabMap | None]  # of the draft models with another tokenizer
    heads: DraftHeadSet
    context: int  # tokens
    corpus: DraftCorpusConfig | None = None
    custom_drafter: Drafter | None = None  # overrides all of the config's

    def cache_size(self, memory: MemoryPlan) -> CacheSize:
        """Return the size of the KV cache of every model, whose pages correspond."""
        return CacheSize(memory.pages, self.config.page_size, self.context)


def resolve_models(
    config: EngineConfig, speculation: SpeculationConfig, drafter: Drafter | None, progress: Progress
) -> ResolvedModels:
    """Find all models and check that they work together, so that wrong settings fail before a long load."""
    set_threads(config.threads, config.tensor_parallel_size)
    speculation = with_shipped_heads(speculation, config.model)
    check_rule(speculation.rule)
    if drafter is not None and not drafter.name:
        raise RequestError("drafter", f"{type(drafter).__name__} has no name; set its attribute `name`")
    if drafter is not None and speculation.draft_corpus:
        raise RequestError("draft_corpus", "has no effect with a Drafter object; name the drafters instead")
    corpus = read_corpus_config(speculation)
    draft_names = () if drafter is not None else draft.models_wanted(speculation)
    target = open_model(config.model, config, progress, config.tensor_parallel_size)
    default_sampling(config, target.checkpoint)  # to refuse a wrong generation config now
    notices = (
        describe_quantization(config, target),
        describe_executor(config, target, _max_context(config, target.config)),
    )
    for line in filter(None, notices):
        progress(line)
    check_ranks(target.config, target.device, speculation, config.tensor_parallel_size)
    if drafter is not None:
        context = _max_context(config, target.config)
        return ResolvedModels(config, speculation, target, {}, {}, DraftHeadSet(target, {}), context, None, drafter)
    if target.cpu_quantization in draft.copies_wanted(speculation):
        progress(f"self:{target.cpu_quantization} is the target itself here; with quantization none it is a copy")
    draft_models = _open_draft_models(draft_names, config, speculation, target, progress)
    for name, model in draft_models.items():
        if model.checkpoint.quantization is not None:
            progress(describe_quantization(replace(config, model=name), model))
    heads = DraftHeadSet.opened(draft.heads_wanted(speculation), target, config.model)
    vocab_maps = {name: _vocab_map(target, model, f"model:{name}", progress) for name, model in draft_models.items()}
    context = _max_context(config, target.config)
    return ResolvedModels(config, speculation, target, draft_models, vocab_maps, heads, context, corpus)


def _open_draft_models(
    names: tuple[str, ...],
    config: EngineConfig,
    speculation: SpeculationConfig,
    target: ModelSource,
    progress: Progress,
) -> dict[str, ModelSource]:
    """Return the draft models by name, on their device and with their tensor-parallel size."""
    own_config = replace(config, revision=speculation.draft_revision, chat_template=None, rope_scaling=None)
    if speculation.draft_device is not None:
        device = choose_device(speculation.draft_device, "draft_device")
        own_config = replace(own_config, device=str(device))
    ranks = speculation.draft_tensor_parallel_size
    like = target if ranks > 1 else replace(target, shard=None)
    return {
        name: open_distilled(name, like, config.model) or open_model(name, own_config, progress, ranks)
        for name in names
    }


def _vocab_map(target: ModelSource, draft_model: ModelSource, name: str, progress: Progress) -> VocabMap | None:
    """Return how the tokens of a draft model are translated, None if they need not be; raise if they cannot be."""
    compat = check_draft_compat(target, draft_model)
    if not compat.works:
        raise RequestError("drafter", f"{name} will not work: {compat.message}")
    if compat.kind != "same":
        progress(f"{name}: {compat.message}")
    return compat.vocab_map


def _max_context(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > model.context:
        hint = "; extend it with --rope-scaling yarn:FACTOR" if config.rope_scaling is None else ""
        raise RequestError("max_model_len", f"{wanted} is more than the model's {model.context}{hint}")
    return model.context if wanted is None else wanted


def default_sampling(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling parameters of requests that leave them out, by the config."""
    named = config.generation_config
    if named not in ("auto", NO_GENERATION_CONFIG):
        folder = Path(os.path.expanduser(named))
        if not (folder / GENERATION).is_file():
            raise RequestError("generation_config", f"{named} has no {GENERATION}; use auto, vllm or a folder with one")
        checkpoint = replace(checkpoint, kind="folder", generation=read_generation(folder))
    own = {} if named == NO_GENERATION_CONFIG else sampling_defaults(checkpoint)
    return own | generation_overrides(config.override_generation_config)


def set_threads(wanted: int | None, ranks: int = 1) -> None:
    """Set torch's CPU threads: `wanted`, or one for each physical core. Ranks share them."""
    if wanted is None and "OMP_NUM_THREADS" not in os.environ:
        wanted = usable_cores() if ranks > 1 else min(torch.get_num_threads(), usable_cores())
    each = max(1, (wanted or torch.get_num_threads()) // ranks)
    if each != torch.get_num_threads():
        torch.set_num_threads(each)
