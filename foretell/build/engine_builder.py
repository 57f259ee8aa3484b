"""Builds an engine in four phases: resolve the models (`resolve.py`), plan memory, load the weights, assemble."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from foretell import draft
from foretell.build.controller_factory import build_controller, costs_file, default_choice
from foretell.build.draft_corpus import open_corpus
from foretell.build.model_source import CacheSize, ModelSource, Progress, no_progress
from foretell.build.resolve import ResolvedModels, default_sampling, resolve_models
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft.base import Drafter
from foretell.draft.corpus.corpus import DraftCorpus
from foretell.draft.heads.tree import MAX_WIDTH
from foretell.draft.heads.warmup import DummyHeads
from foretell.draft.mix import MixDrafter
from foretell.engine.cost_profiler import CostProfiler
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.engine.warmup import Warmup, warmup_tasks
from foretell.kv.prefix import PrefixIndex
from foretell.kv.swap import Swap
from foretell.models.fast_paths import missing_fast_path
from foretell.models.hf_config import eos_token_ids
from foretell.models.quantize import quantized_copy
from foretell.runner.memory_plan import (
    GIB,
    HeadLimits,
    HeadMemoryNeeds,
    MemoryNeeds,
    MemoryPlan,
    check_draft_fits,
    device_memory,
    plan_memory,
)
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.grammar import GrammarCompiler
from foretell.tensor_parallel import (
    TensorParallelGroup,
    describe_ranks,
    head_bytes,
    launch_workers,
    make_leader,
    weight_bytes,
)
from foretell.tokenizer import Tokenizer

MAX_WARMUP_DRAFT = 16  # draft tokens; longer drafts are rarely chosen even where they are allowed


@dataclass(frozen=True)
class Assembly:
    """An engine and what its callers need."""

    engine: Engine
    tokenizer: Tokenizer
    requests: RequestBuilder
    grammars: GrammarCompiler
    memory: MemoryPlan
    sampling_defaults: dict[str, Any]
    profiler: CostProfiler
    warmup: Warmup
    workers: TensorParallelGroup | None = None  # worker processes of a tensor-parallel model
    corpus: DraftCorpus | None = None  # files to draft from

    def while_idle(self) -> bool:
        """Run one piece of idle work; return False when none is left. Costs are measured after the warm-up."""
        return self.warmup.run_one() or self.profiler.run_one()

    def close(self) -> None:
        """End the worker processes."""
        if self.workers is not None:
            self.workers.close()


def build_engine(
    config: EngineConfig,
    speculation: SpeculationConfig,
    drafter: Drafter | None = None,
    progress: Progress = no_progress,
) -> Assembly:
    """Build an engine. `drafter` overrides the config's."""
    with ExitStack() as on_failure:
        models = resolve_models(config, speculation, drafter, progress)
        models, memory = _plan_memory(models)
        loaded = _load(models, memory, progress, on_failure)
        assembly = _assemble(models, memory, loaded)
        on_failure.pop_all()
    return assembly


@dataclass(frozen=True)
class _Loaded:
    """The loaded target and drafter."""

    runner: ModelRunner
    drafter: MixDrafter
    workers: TensorParallelGroup | None
    corpus: DraftCorpus | None = None


# Phase 2: plan memory.


def _plan_memory(models: ResolvedModels) -> tuple[ResolvedModels, MemoryPlan]:
    """Plan the memory, and drop drafters of the config that leave too little for the KV cache."""
    if models.custom_drafter is None:
        speculation = draft.fit_to_memory(models.speculation, partial(_memory_for, models))
        heads = models.heads.only(draft.heads_wanted(speculation))
        models = replace(models, speculation=speculation, heads=heads)
    return models, _memory_for(models, models.speculation)


def _memory_for(models: ResolvedModels, speculation: SpeculationConfig) -> MemoryPlan:
    """Plan the memory of an engine with the drafters of `speculation`."""
    config, target, context = models.config, models.target, models.context
    if models.custom_drafter is not None:
        return _count_memory(config, target, [], models.custom_drafter.traits.weight_bytes, context)
    copies = sum(map(target.copy_bytes, draft.copies_wanted(speculation)))
    draft_models = [models.draft_models[name] for name in draft.models_wanted(speculation)]
    heads = models.heads.only(draft.heads_wanted(speculation))
    return _count_memory(
        config, target, draft_models, copies, context, heads.needs(_most_asked(config, speculation, context))
    )


def _count_memory(
    config: EngineConfig,
    target: ModelSource,
    draft_models: list[ModelSource],
    extra: int,
    context: int,
    heads: HeadMemoryNeeds = HeadMemoryNeeds(),
) -> MemoryPlan:
    """Plan the memory; `extra` is the size in bytes of copies of the target.

    A draft model has as many pages as the target, so that it can follow every sequence.
    """
    elsewhere = [model for model in draft_models if model.device != target.device]
    draft_models = [model for model in draft_models if model.device == target.device]
    token_bytes = target.token_bytes + sum(model.token_bytes for model in draft_models) + heads.kv_bytes_per_token
    extra += heads.weights + sum(model.weight_bytes for model in draft_models)
    page_bytes = config.page_size * token_bytes
    loading = max(model.loading_bytes for model in (target, *draft_models)) + extra
    if heads.wiring_check:  # after the target's weights are quantized
        loading = max(loading, target.weight_bytes + extra + heads.wiring_check)
    needs = MemoryNeeds(target.weight_bytes, extra, page_bytes, config.page_size, context, config.max_num_seqs, loading)
    free = device_memory(target.device)
    if target.shard is not None and target.device.type == "cpu":
        free //= target.shard.size  # ranks share the machine's memory, and the first one also holds the drafter
    if target.device.type == "cuda":  # the KV cache takes all that is left, as far as `max_num_seqs` can fill it
        free = int(free * config.gpu_memory_utilization)
        work = sum(model.step_workspace(config.max_num_batched_tokens, context) for model in (target, *draft_models))
        needs = replace(needs, workspace=work + heads.workspace, sequences=config.max_num_seqs, cache_fraction=1.0)
        needs = replace(needs, utilization=config.gpu_memory_utilization)
    plan = plan_memory(needs, free, config.kv_memory)
    for model in elsewhere:
        check_draft_fits(model.weight_bytes + plan.pages * config.page_size * model.token_bytes, model.device)
    return plan


def _most_asked(config: EngineConfig, speculation: SpeculationConfig, context: int) -> HeadLimits:
    """Return the largest batch and draft that heads are asked for."""
    wide = MAX_WIDTH if speculation.tree else 1
    tokens = config.max_num_batched_tokens
    return HeadLimits(config.max_num_seqs, context, tokens, max(1, speculation.budget), wide, config.page_size)


# Phase 3: load.


def _load(models: ResolvedModels, memory: MemoryPlan, progress: Progress, on_failure: ExitStack) -> _Loaded:
    """Start the worker processes and load the target, its heads and its drafter. `on_failure` ends the processes."""
    workers = _start_workers(models, memory, on_failure)
    copies = () if models.custom_drafter is not None else draft.copies_wanted(models.speculation)
    with _background_warmup(models, memory):
        model = models.target.load(workers) if copies else models.target.load_packed(workers)
    copied = {format: quantized_copy(model, format) for format in copies}  # before the runner packs the weights
    models.heads.load(model, models.context)  # likewise
    hidden_layers = () if models.custom_drafter is None else models.custom_drafter.traits.hidden_layers
    cache_size = models.cache_size(memory)
    runner = models.target.make_runner(model, cache_size, hidden_layers, models.heads.kv_layers)
    runner.set_device()
    worker_bytes: list[int] = []
    if workers is not None:
        make_leader(runner, workers)
        worker_bytes = workers.wait_ready()
    heads = models.heads.place(runner, progress) if models.custom_drafter is None else {}
    if workers is not None:
        own_bytes = sum(head_bytes(each.head, runner.model) for each in heads.values())
        progress(describe_ranks([weight_bytes(runner.model) + own_bytes, *worker_bytes]))
    if models.custom_drafter is not None:
        return _Loaded(runner, MixDrafter.of(models.custom_drafter), workers)
    corpus = open_corpus(models.corpus, models.target.tokenizer, progress)
    loader = draft.Loader(
        models.speculation,
        models.target,
        runner,
        models.draft_models,
        models.vocab_maps,
        partial(_run_draft_model, models, cache_size, workers),
        cache_size.pages * cache_size.page_size,
        heads,
        max_rows=models.config.max_num_batched_tokens,
        corpus=corpus,
    )
    drafter = draft.build(loader.parts(draft.models_wanted(models.speculation), copied), loader.reload)
    return _Loaded(runner, drafter, workers, corpus)


def _start_workers(models: ResolvedModels, memory: MemoryPlan, on_failure: ExitStack) -> TensorParallelGroup | None:
    """Start the worker processes of a tensor-parallel model, which load their shards alongside this process."""
    ranks = models.config.tensor_parallel_size
    if ranks == 1:
        return None
    cache_size = models.cache_size(memory)
    specs = [models.target.shard_spec(cache_size, models.heads.folders)]
    specs += [models.draft_models[name].shard_spec(cache_size) for name in _sharded_draft_models(models)]
    workers = launch_workers(specs, models.target.device, ranks)
    on_failure.callback(workers.close)
    return workers


def _sharded_draft_models(models: ResolvedModels) -> list[str]:
    return [name for name, model in models.draft_models.items() if model.shard is not None]


def _background_warmup(models: ResolvedModels, memory: MemoryPlan) -> AbstractContextManager[object]:
    """Compile kernels while the weights are loaded, with dummy heads in the memory that is free until then."""
    target, heads = models.target, models.heads
    spare = device_memory(target.device) - max(memory.weights + memory.drafter, target.loading_bytes)
    spare -= heads.weight_bytes + models.context * heads.token_bytes  # of the dummy heads
    dummy_heads = DummyHeads(heads.configs, models.speculation.tree > 0) if heads.found else None
    has_drafts = models.custom_drafter is not None or models.speculation.budget > 0
    return target.background_warmup(models.cache_size(memory), spare, has_drafts, dummy_heads)


def _run_draft_model(
    models: ResolvedModels, cache_size: CacheSize, workers: TensorParallelGroup | None, name: str
) -> ModelRunner:
    """Load a draft model and return its runner."""
    source = models.draft_models[name]
    runner = source.make_runner(source.load_packed(workers), cache_size)
    runner.logits_device = models.target.device
    if workers is not None and source.shard is not None:
        make_leader(runner, workers, 1 + _sharded_draft_models(models).index(name))
    return runner


# Phase 4: assemble.


def _assemble(models: ResolvedModels, memory: MemoryPlan, loaded: _Loaded) -> Assembly:
    """Build the engine around the loaded target and drafter, and run the start-up part of its warm-up."""
    config, speculation, target = models.config, models.speculation, models.target
    runner, drafter, workers = loaded.runner, loaded.drafter, loaded.workers
    prefix = PrefixIndex(runner.pool) if config.prefix_cache else None
    can_swap = target.device.type == "cuda" and workers is None  # with ranks, each would have to swap its own pages
    swap_bytes = int(config.swap_space * GIB) if can_swap else 0
    swap = Swap(runner.cache, swap_bytes) if swap_bytes else None
    scheduler = Scheduler(runner, prefix, config.max_num_seqs, config.max_num_batched_tokens, swap)
    controller = build_controller(speculation, drafter, target)
    engine = Engine(runner, drafter, controller, scheduler, target.tokenizer)
    profiler = CostProfiler(engine, controller, costs_file(config.model, target))
    is_loaded = profiler.load()
    warmup = Warmup(engine, partial(_warmup_tasks, speculation, workers is not None))
    warmup.run()
    if target.device.type == "cpu" and drafter.default_drafters and not is_loaded:
        profiler.run_at_start()
    limits = RequestLimits(
        models.context, target.tokenizer.end_ids | eos_token_ids(target.checkpoint), target.config.vocab
    )
    return Assembly(
        engine=engine,
        tokenizer=target.tokenizer,
        requests=RequestBuilder(limits, target.tokenizer, drafter, default_choice(speculation)),
        grammars=GrammarCompiler(target.tokenizer, target.config.vocab),
        memory=memory,
        sampling_defaults=default_sampling(config, target.checkpoint),
        profiler=profiler,
        warmup=warmup,
        workers=workers,
        corpus=loaded.corpus,
    )


def _warmup_tasks(speculation: SpeculationConfig, is_sharded: bool, warmup: Warmup) -> Iterable[Callable[[], None]]:
    """Return the warm-up of a CUDA device; nothing without Triton, because then no CUDA graphs are captured.

    A tensor-parallel model warms up with its first request: before that nothing reports a worker that fails.
    """
    runner = warmup.engine.runner
    if runner.device.type != "cuda" or is_sharded or find_spec("triton") is None:
        return ()
    if missing_fast_path(runner.model.config, "cuda", runner.context) is not None:
        return ()
    names = draft.drafter_names(speculation)  # a custom drafter gets no dummy sequences
    return warmup_tasks(warmup, names, min(speculation.budget, MAX_WARMUP_DRAFT), speculation.tree)
