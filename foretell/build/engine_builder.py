"""Where the parts are put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from foretell import draft
from foretell.build.controller_factory import build_controller, costs_file, default_choice
from foretell.build.draft_compat import DraftCompat, judge_pair
from foretell.build.draft_heads import DraftHeadSet, distilled, settled
from foretell.build.model_source import CacheSize, ModelSource, choose_device, open_model, say_nothing
from foretell.config import EngineConfig, SpeculationConfig
from foretell.draft.base import Drafter
from foretell.draft.heads.tree import MOST_WIDE
from foretell.draft.heads.warmup import DummyHeads
from foretell.engine.cost_profiler import CostProfiler
from foretell.engine.engine import Engine
from foretell.engine.request_builder import Limits, RequestBuilder, check_rule
from foretell.engine.scheduler import Scheduler
from foretell.engine.warmup import Warmup, all_pieces
from foretell.errors import RequestError
from foretell.kv.prefix import PrefixIndex
from foretell.kv.swap import Swap
from foretell.models.config import ModelConfig
from foretell.models.hf_config import eos_token_ids, sampling_defaults
from foretell.models.quantize import quantized_copy
from foretell.runner.heads.memory import HeadNeeds, MostAsked
from foretell.runner.memory_plan import GIB, MemoryPlan, Needs, check_room, device_memory, plan_memory
from foretell.runner.model_runner import ModelRunner
from foretell.sampling.grammar import GrammarCompiler
from foretell.tensor_parallel import (
    TensorParallelGroup,
    check_ranks,
    head_bytes,
    held_bytes,
    lead,
    ranks_words,
    start_team,
)
from foretell.tokenizer import Tokenizer
from foretell.utils.system import usable_cores

MOST_REHEARSED = 16  # nodes of a draft; who lets more be guessed seldom gets them


@dataclass(frozen=True)
class Assembly:
    """An engine and what a caller needs to talk to it."""

    engine: Engine
    tokenizer: Tokenizer
    requests: RequestBuilder
    grammars: GrammarCompiler
    memory: MemoryPlan
    sampling_defaults: dict[str, Any]
    profiler: CostProfiler
    rehearsal: Warmup
    team: TensorParallelGroup | None = None  # the ranks of a model that is split

    def while_idle(self) -> bool:
        """Do a piece of what nobody waits for; False when nothing is left. What is recorded is measured after that."""
        return self.rehearsal.piece() or self.profiler.piece()

    def close(self) -> None:
        """End what runs beside this process."""
        if self.team is not None:
            self.team.close()


def build_engine(
    config: EngineConfig,
    speculation: SpeculationConfig,
    drafter: Drafter | None = None,
    say: Callable[[str], None] = say_nothing,
) -> Assembly:
    """Find the models, count the memory, load them, and make the loop. `drafter` overrides the config's."""
    with ExitStack() as failing:
        assembly = _build(config, speculation, drafter, say, failing)
        failing.pop_all()
    return assembly


def _build(
    config: EngineConfig,
    speculation: SpeculationConfig,
    drafter: Drafter | None,
    say: Callable[[str], None],
    failing: ExitStack,
) -> Assembly:
    """`failing` ends what was started, should it come to that."""
    ranks = config.tensor_parallel_size
    set_threads(config.threads, ranks)
    speculation = settled(speculation, config.model)
    check_rule(speculation.rule)  # wrong names fail before a long load
    if drafter is not None and not drafter.name:
        raise RequestError("drafter", f"{type(drafter).__name__} has no name; give it one, for the records")
    wanted = () if drafter is not None else draft.models_wanted(speculation)
    target = open_model(config.model, config, say, ranks)
    check_ranks(target.config, target.device, speculation, ranks)
    if drafter is None and target.cpu_quantization in draft.copies_wanted(speculation):
        name = f"self:{target.cpu_quantization}"
        say(f"{name} is the target itself here and will not pay; quantization none makes it a copy")
    helpers = _open_helpers(wanted, config, speculation, target, say)
    heads = DraftHeadSet.opened(() if drafter is not None else draft.heads_wanted(speculation), target, config.model)
    pairings = {name: _pair(target, helper, f"model:{name}", say) for name, helper in helpers.items()}
    context = _context(config, target.config)

    def planned(chosen: SpeculationConfig) -> MemoryPlan:
        if drafter is not None:
            return _plan_memory(config, target, [], drafter.memory, context)
        extra = sum(map(target.copy_bytes, draft.copies_wanted(chosen)))
        models, few = [helpers[name] for name in draft.models_wanted(chosen)], heads.only(draft.heads_wanted(chosen))
        return _plan_memory(config, target, models, extra, context, few.needs(_most_asked(config, chosen, context)))

    def run_helper(name: str) -> ModelRunner:
        helper = helpers[name].runner(helpers[name].load_packed(team), room)
        helper.logits_device = target.device
        if team is not None and name in shared:
            lead(helper, team, 1 + shared.index(name))
        return helper

    if drafter is None:
        speculation = draft.fitted(speculation, planned)
        heads = heads.only(draft.heads_wanted(speculation))
    memory = planned(speculation)
    room = CacheSize(memory.pages, config.page_size, context)
    team, shared = None, [name for name, helper in helpers.items() if helper.shard is not None]
    if ranks > 1:
        parts = [target.part(room, heads.folders), *(helpers[name].part(room) for name in shared)]
        team = start_team(parts, target.device, ranks)
        failing.callback(team.close)
    copies = () if drafter is not None else draft.copies_wanted(speculation)
    spare = device_memory(target.device) - max(memory.weights + memory.drafter, target.loading)
    spare -= heads.weights + context * heads.token_bytes  # of those that stand for them
    sketched = DummyHeads(heads.configs, speculation.tree > 0) if heads.found else None
    with target.warming(room, spare, drafter is not None or speculation.budget > 0, sketched):
        model = target.load(team) if copies else target.load_packed(team)
    twins = {form: quantized_copy(model, form) for form in copies}  # before the runner packs the weights away
    heads.load(model, context)  # likewise
    runner = target.runner(model, room, () if drafter is None else drafter.hidden_layers, heads.beside)
    runner.set_device()
    if team is not None:
        lead(runner, team)
        others = team.wait()
    placed = heads.place(runner, say) if drafter is None else {}
    if team is not None:
        own = sum(head_bytes(each.head, runner.model) for each in placed.values())
        say(ranks_words([held_bytes(runner.model) + own, *others]))
    if drafter is None:
        vocabularies = {name: pairing.vocabularies for name, pairing in pairings.items()}
        loader = draft.Loader(
            *(speculation, target, runner, helpers, vocabularies, run_helper, room.pages * room.page_size, placed),
            max_rows=config.max_num_batched_tokens,
        )
        drafter = draft.build(loader.parts(draft.models_wanted(speculation), twins), loader.again)
    return _assembled(config, speculation, target, runner, drafter, memory, team, context)


def _open_helpers(
    wanted: tuple[str, ...],
    config: EngineConfig,
    speculation: SpeculationConfig,
    target: ModelSource,
    say: Callable[[str], None],
) -> dict[str, ModelSource]:
    """Draft models by name, where and in as many parts as they are to run."""
    if speculation.draft_device is not None:
        device = choose_device(speculation.draft_device, "draft_device")
        beside = replace(config, device=str(device), revision=speculation.draft_revision)
    else:
        beside = replace(config, revision=speculation.draft_revision)
    split = speculation.draft_tensor_parallel_size
    like = target if split > 1 else replace(target, shard=None)
    return {name: distilled(name, like, config.model) or open_model(name, beside, say, split) for name in wanted}


def _assembled(
    config: EngineConfig,
    speculation: SpeculationConfig,
    target: ModelSource,
    runner: ModelRunner,
    drafter: Drafter,
    memory: MemoryPlan,
    team: TensorParallelGroup | None,
    context: int,
) -> Assembly:
    """The loop around a runner and a drafter, and what callers talk to."""
    prefix = PrefixIndex(runner.pool) if config.prefix_cache else None
    swaps = target.device.type == "cuda" and team is None  # a copy of one rank's pages is of no use
    host_room = int(config.swap_space * GIB) if swaps else 0
    swap = Swap(runner.cache, host_room) if host_room else None
    scheduler = Scheduler(runner, prefix, config.max_num_seqs, config.max_num_batched_tokens, swap)
    controller = build_controller(speculation, drafter, target)
    engine = Engine(runner, drafter, controller, scheduler, target.tokenizer)
    profiler = CostProfiler(engine, controller, costs_file(config.model, target))
    profiler.load()
    rehearsal = Warmup(engine, partial(_rehearsed, speculation, team is not None))
    rehearsal.run()
    limits = Limits(context, target.tokenizer.end_ids | eos_token_ids(target.checkpoint), target.config.vocab)
    requests = RequestBuilder(limits, target.tokenizer, drafter, default_choice(speculation))
    grammars = GrammarCompiler(target.tokenizer, target.config.vocab)
    defaults = sampling_defaults(target.checkpoint)
    return Assembly(engine, target.tokenizer, requests, grammars, memory, defaults, profiler, rehearsal, team)


def _rehearsed(speculation: SpeculationConfig, is_split: bool, rehearsal: Warmup) -> Iterable[Callable[[], None]]:
    """What a CUDA device does before the first request. Ranks do it with their first: there is nobody yet to hear of
    one that fails. Without Triton nothing is recorded."""
    if rehearsal.engine.runner.device.type != "cuda" or is_split or find_spec("triton") is None:
        return ()
    named = draft.arms(speculation)  # a drafter of the caller's own is shown no text that is none
    return all_pieces(rehearsal, named, min(speculation.budget, MOST_REHEARSED), speculation.tree)


def set_threads(wanted: int | None, ranks: int = 1) -> None:
    """As many as are wanted, or one for each core there is: more of them only wait for each other. Ranks share them."""
    if wanted is None and "OMP_NUM_THREADS" not in os.environ:
        wanted = usable_cores() if ranks > 1 else min(torch.get_num_threads(), usable_cores())
    each = max(1, (wanted or torch.get_num_threads()) // ranks)
    if each != torch.get_num_threads():
        torch.set_num_threads(each)


def _pair(target: ModelSource, helper: ModelSource, name: str, say: Callable[[str], None]) -> DraftCompat:
    """How the draft model will guess; one that cannot is refused before a long load."""
    found = judge_pair(target, helper)
    if not found.works:
        raise RequestError("drafter", f"{name} will not work: {found.words}")
    if found.kind != "same":
        say(f"{name}: {found.words}")
    return found


def _plan_memory(
    config: EngineConfig,
    target: ModelSource,
    helpers: list[ModelSource],
    extra: int,
    context: int,
    heads: HeadNeeds = HeadNeeds(),
) -> MemoryPlan:
    """A draft model has as many pages as the target, so that it can follow every text; `extra`: bytes of copies."""
    away = [helper for helper in helpers if helper.device != target.device]
    helpers = [helper for helper in helpers if helper.device == target.device]
    token_bytes = target.token_bytes + sum(helper.token_bytes for helper in helpers) + heads.token
    extra += heads.weights + sum(helper.weights for helper in helpers)
    page_bytes = config.page_size * token_bytes
    loading = max(model.loading for model in (target, *helpers)) + extra
    if heads.examining:  # when the target's weights are what they will be
        loading = max(loading, target.weights + extra + heads.examining)
    needs = Needs(target.weights, extra, page_bytes, config.page_size, context, config.max_num_seqs, loading)
    free = device_memory(target.device)
    if target.shard is not None and target.device.type == "cpu":
        free //= target.shard.size  # ranks share the machine's memory; the first one's share has to hold the drafter
    if target.device.type == "cuda":  # nobody else is to have the rest: the cache takes it, as far as texts can fill it
        free = int(free * config.gpu_memory_utilization)
        work = sum(model.step_bytes(config.max_num_batched_tokens, context) for model in (target, *helpers))
        needs = replace(needs, workspace=work + heads.workspace, texts=config.max_num_seqs, cache_share=1.0)
        needs = replace(needs, taken=config.gpu_memory_utilization)
    plan = plan_memory(needs, free, config.kv_memory)
    for helper in away:
        check_room(helper.weights + plan.pages * config.page_size * helper.token_bytes, helper.device)
    return plan


def _most_asked(config: EngineConfig, speculation: SpeculationConfig, context: int) -> MostAsked:
    """The most that heads will be asked for."""
    wide = MOST_WIDE if speculation.tree else 1
    tokens = config.max_num_batched_tokens
    return MostAsked(config.max_num_seqs, context, tokens, max(1, speculation.budget), wide, config.page_size)


def _context(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > model.context:
        raise RequestError("max_model_len", f"{wanted} is more than the model's {model.context}")
    return model.context if wanted is None else wanted
