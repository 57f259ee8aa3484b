"""Where the parts are put together."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import draft
from .config import EngineConfig, SpeculationConfig
from .control.adaptive import AdaptiveController
from .control.costs import CostPrior, StepCosts
from .control.settings import ArmTraits, Settings
from .draft.base import Drafter
from .engine.engine import Engine
from .engine.profile import Profiler
from .engine.requests import AUTO, Limits, RequestMaker, check_rule
from .engine.scheduler import Scheduler
from .errors import RequestError
from .heads import Heads, distilled, settled
from .hub import Checkpoint, open_checkpoint, resolve
from .kernels.rounded import Rounding
from .kv.cache import LayerShape
from .kv.prefix import PrefixIndex
from .kv.swap import Swap
from .models.config import ModelConfig
from .models.decoder import Decoder
from .models.load import choose_dtype, is_rounded, load_model
from .models.quantize import Bits, native_for
from .models.read_config import end_ids, read_config, sampling_defaults
from .models.shard import Shard
from .models.variants import prepared_bytes, quantize_weights, quantized, quantized_bytes, round_weights
from .pairing import Pairing, judge_pair
from .parallel import Part, Team, check_ranks, held_bytes, lead, ranks_words, start_team
from .runner.memory import GIB, MemoryPlan, Needs, check_room, device_memory, plan_memory, step_bytes
from .runner.runner import ModelRunner
from .sampling.grammar import GrammarCompiler
from .system import home, processor, usable_cores
from .tokenizer import Tokenizer
from .types import SpeculationChoice
from .verify.threshold import ThresholdSettings


@dataclass(frozen=True)
class Assembly:
    """An engine and what a caller needs to talk to it."""

    engine: Engine
    tokenizer: Tokenizer
    requests: RequestMaker
    grammars: GrammarCompiler
    memory: MemoryPlan
    sampling_defaults: dict[str, Any]
    profiler: Profiler
    team: Team | None = None  # the ranks of a model that is split

    def close(self) -> None:
        """End what runs beside this process."""
        if self.team is not None:
            self.team.close()


def say_nothing(_: str) -> None:
    """For callers who want no progress shown."""


def say_on_stderr(line: str) -> None:
    """Standard output belongs to results."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Opened:
    """A model that was looked at and not yet loaded."""

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    bits: Bits | None = None  # of a weight, where they are to be integers
    rounding: Rounding | None = None  # of weights and rows, on a CUDA device
    shard: Shard | None = None  # of a model that is split, the part that is loaded here

    @property
    def local(self) -> ModelConfig:
        """What lies here."""
        return self.config if self.shard is None else self.shard.part_of(self.config)

    @property
    def weights(self) -> int:
        return prepared_bytes(self.local, self.dtype, self.device, self.bits, self.rounding)

    @property
    def loading(self) -> int:
        """What its weights take in floats, before they are rounded."""
        rounded = self.bits is not None or self.rounding is not None
        return prepared_bytes(self.local, self.dtype, "meta") if rounded else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of cache one token takes."""
        layer = LayerShape(self.local.kv_heads, self.config.head_dim)
        return self.config.layers * layer.bytes_per_token(self.dtype)

    def step_bytes(self, tokens: int) -> int:
        """What its steps work with on a GPU."""
        c = self.local
        width = 3 * c.width + 3 * c.ffn + (2 * c.heads + 2 * c.kv_heads) * c.head_dim
        return step_bytes(width, tokens, self.config.vocab, self.dtype.itemsize)

    def load(self, team: Team | None = None) -> Decoder:
        """Its weights, or the first rank's part of them, and what joins it to the others."""
        model = load_model(self.checkpoint, self.dtype, self.device, self.shard)
        if team is not None and self.shard is not None:
            model.meet(team.group)
        return model

    def part(self, room: Room) -> Part:
        """What other ranks are to load of a model that is split, and the room they give it."""
        context = min(room.context, self.config.context)
        ways = (self.dtype, self.bits, self.rounding)
        return Part(self.checkpoint.path, *ways, room.pages, room.page_size, context)

    def ready(self, model: Decoder) -> Decoder:
        """The loaded model with its weights as they will run; a copy in integers is made before this."""
        if self.rounding is not None:
            return round_weights(model, self.rounding)
        return model if self.bits is None else quantize_weights(model, self.bits)

    def runner(
        self, model: Decoder, room: Room, taps: tuple[int, ...] = (), beside: tuple[LayerShape, ...] = ()
    ) -> ModelRunner:
        """What runs it, once it is loaded; `beside` are further layers of its cache."""
        context = min(room.context, self.config.context)
        return ModelRunner(self.ready(model), room.pages, room.page_size, context, taps, beside)

    def copy_bytes(self, bits: Bits) -> int:
        """What its weights take again in so many bits."""
        return quantized_bytes(self.local, bits, self.dtype, self.device)


@dataclass(frozen=True)
class Room:
    """Pages of the cache, and the longest text in them."""

    pages: int
    page_size: int
    context: int


def open_model(name: str, config: EngineConfig, say: Callable[[str], None], ranks: int = 1) -> Opened:
    """Find a model and read what it is made of; with several ranks, for the first of them."""
    checkpoint = open_checkpoint(resolve(name, say))
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
    return Opened(checkpoint, model_config, read_tokenizer(checkpoint), dtype, device, bits, rounding, shard)


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
    if drafter is None and target.bits in draft.copies_wanted(speculation):
        say(f"self:int{target.bits} is the target itself here and will not pay; quantization none makes it a copy")
    beside = config
    if speculation.draft_device is not None:
        beside = replace(config, device=str(choose_device(speculation.draft_device, "draft_device")))
    split = speculation.draft_tensor_parallel_size
    like = target if split > 1 else replace(target, shard=None)
    helpers = {name: distilled(name, like, config.model) or open_model(name, beside, say, split) for name in wanted}
    heads = Heads.opened(() if drafter is not None else draft.heads_wanted(speculation), target, config.model)
    pairings = {name: _pair(target, helper, f"model:{name}", say) for name, helper in helpers.items()}
    context = _context(config, target.config)

    def planned(chosen: SpeculationConfig) -> MemoryPlan:
        if drafter is not None:
            return _plan_memory(config, target, [], drafter.memory, context)
        extra = sum(map(target.copy_bytes, draft.copies_wanted(chosen)))
        models, few = [helpers[name] for name in draft.models_wanted(chosen)], heads.only(draft.heads_wanted(chosen))
        return _plan_memory(config, target, models, extra + few.weights, context, few.token_bytes)

    def run_helper(name: str) -> ModelRunner:
        helper = helpers[name].runner(helpers[name].load(team), room)
        helper.answers_on = target.device
        if team is not None and name in shared:
            lead(helper, team, 1 + shared.index(name))
        return helper

    if drafter is None:
        speculation = draft.fitted(speculation, planned)
        heads = heads.only(draft.heads_wanted(speculation))
    memory = planned(speculation)
    room = Room(memory.pages, config.page_size, context)
    team, shared = None, [name for name, helper in helpers.items() if helper.shard is not None]
    if ranks > 1:
        parts = [target.part(room), *(helpers[name].part(room) for name in shared)]
        team = start_team(parts, target.device, ranks)
        failing.callback(team.close)
    model = target.load(team)
    copies = () if drafter is not None else draft.copies_wanted(speculation)
    twins = {bits: quantized(model, bits) for bits in copies}  # before the runner packs the weights away
    heads.load(model, context)  # likewise
    runner = target.runner(model, room, () if drafter is None else drafter.taps, heads.beside)
    if team is not None:
        lead(runner, team)
        say(ranks_words([held_bytes(runner.model), *team.wait()]))
    if drafter is None:
        placed = heads.place(runner, say)
        vocabularies = {name: pairing.vocabularies for name, pairing in pairings.items()}
        loader = draft.Loader(
            speculation, target, runner, helpers, vocabularies, run_helper, room.pages * room.page_size, placed
        )
        drafter = draft.build(loader.parts(draft.models_wanted(speculation), twins), loader.again)
    prefix = PrefixIndex(runner.pool) if config.prefix_cache else None
    swaps = target.device.type == "cuda" and team is None  # a copy of one rank's pages is of no use
    host_room = int(config.swap_space * GIB) if swaps else 0
    swap = Swap(runner.cache, host_room) if host_room else None
    scheduler = Scheduler(runner, prefix, config.max_num_seqs, config.max_num_batched_tokens, swap)
    controller = build_controller(speculation, drafter, target)
    engine = Engine(runner, drafter, controller, scheduler, target.tokenizer)
    profiler = Profiler(engine, controller, costs_file(config.model, target))
    profiler.load()
    limits = Limits(context, target.tokenizer.end_ids | end_ids(target.checkpoint), target.config.vocab)
    requests = RequestMaker(limits, target.tokenizer, drafter, default_choice(speculation))
    grammars = GrammarCompiler(target.tokenizer, target.config.vocab)
    defaults = sampling_defaults(target.checkpoint)
    return Assembly(engine, target.tokenizer, requests, grammars, memory, defaults, profiler, team)


def set_threads(wanted: int | None, ranks: int = 1) -> None:
    """As many as are wanted, or one for each core there is: more of them only wait for each other. Ranks share them."""
    if wanted is None and "OMP_NUM_THREADS" not in os.environ:
        wanted = usable_cores() if ranks > 1 else min(torch.get_num_threads(), usable_cores())
    each = max(1, (wanted or torch.get_num_threads()) // ranks)
    if each != torch.get_num_threads():
        torch.set_num_threads(each)


def costs_file(model: str, target: Opened) -> Path:
    """Where what steps cost is kept: for this model on this device with so many threads."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else processor()
    kernels = (target.bits or target.rounding, native_for(target.device) is not None)
    parts: tuple[object, ...] = (model, target.config, target.dtype, kernels, device, torch.get_num_threads())
    parts += () if target.shard is None else (target.shard,)
    return home() / "costs" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.json"


def build_controller(config: SpeculationConfig, drafter: Drafter, target: Opened) -> AdaptiveController:
    """Who decides how far to guess for these drafters."""
    settings = Settings(
        most=config.budget,
        fixed=config.fixed_lengths(),
        throughput=config.goal == "throughput",
        shortest=config.min_draft,
        tree=config.tree,
    )
    arms = drafter.arms.items()
    traits = {name: ArmTraits(arm.free, arm.reads, arm.cost_share, arm.prior, arm.grows) for name, arm in arms}
    return AdaptiveController(traits, settings, StepCosts(_cost_prior(target)), presence=drafter)


def _cost_prior(target: Opened) -> CostPrior:
    """Before anything ran: a GPU takes many rows for the price of one, and a cached token costs its share of bytes."""
    row = 0.03 if target.device.type == "cpu" else 0.002
    return CostPrior(row=row, token=target.token_bytes / target.weights)


def default_choice(config: SpeculationConfig) -> SpeculationChoice:
    """What a request gets that says nothing of speculation."""
    given = (config.acceptance_threshold, config.acceptance_threshold_lower)
    known = ThresholdSettings()
    if config.workload is not None and config.workload != AUTO:
        known = ThresholdSettings.for_workload(config.workload)
    upper, lower = given[0] if given[0] is not None else known.upper, given[1] if given[1] is not None else known.lower
    thresholds = None if given == (None, None) else (upper, lower)
    return SpeculationChoice(rule=config.rule, acceptance_threshold=thresholds, workload=config.workload)


def _pair(target: Opened, helper: Opened, name: str, say: Callable[[str], None]) -> Pairing:
    """How the draft model will guess; one that cannot is refused before a long load."""
    found = judge_pair(target, helper)
    if not found.works:
        raise RequestError("drafter", f"{name} will not work: {found.words}")
    if found.kind != "same":
        say(f"{name}: {found.words}")
    return found


def _plan_memory(
    config: EngineConfig, target: Opened, helpers: list[Opened], extra: int, context: int, beside: int = 0
) -> MemoryPlan:
    """A draft model has as many pages as the target, so that it can follow every text; `beside`: bytes of heads."""
    away = [helper for helper in helpers if helper.device != target.device]
    helpers = [helper for helper in helpers if helper.device == target.device]
    token_bytes = target.token_bytes + sum(helper.token_bytes for helper in helpers) + beside
    extra += sum(helper.weights for helper in helpers)
    page_bytes = config.page_size * token_bytes
    loading = max(model.loading for model in (target, *helpers)) + extra
    needs = Needs(target.weights, extra, page_bytes, config.page_size, context, config.max_num_seqs, loading)
    free = device_memory(target.device)
    if target.shard is not None and target.device.type == "cpu":
        free //= target.shard.size  # ranks share the machine's memory; the first one's share has to hold the drafter
    if target.device.type == "cuda":  # nobody else is to have the rest: the cache takes it, as far as texts can fill it
        free = int(free * config.gpu_memory_utilization)
        work = sum(model.step_bytes(config.max_num_batched_tokens) for model in (target, *helpers))
        needs = replace(needs, workspace=work, texts=config.max_num_seqs, cache_share=1.0)
    plan = plan_memory(needs, free, config.kv_memory)
    for helper in away:
        check_room(helper.weights + plan.pages * config.page_size * helper.token_bytes, helper.device)
    return plan


def choose_bits(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> Bits | None:
    """Of a weight; None for floats. Who names a float type gets it."""
    if config.quantization == "auto":
        fast = device.type == "cpu" and config.dtype == "auto" and native_for(device) is not None
        return 8 if fast and is_rounded(checkpoint) else None
    if config.quantization == "none" or device.type != "cpu":
        return None
    return 8 if config.quantization == "int8" else 4


def choose_rounding(config: EngineConfig, device: torch.device) -> Rounding | None:
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


def _context(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > model.context:
        raise RequestError("max_model_len", f"{wanted} is more than the model's {model.context}")
    return model.context if wanted is None else wanted
