"""A decoder of a few thousand random weights, and engines around it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foretell.certify.distribution_test import random_decoder
from foretell.control.controller import FixedController, FreeDrafts
from foretell.draft.base import Drafter, Wrapper
from foretell.draft.mix import MixDrafter
from foretell.draft.model import ModelDrafter, SelfDrafter
from foretell.draft.registry import head_drafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.engine.engine import Engine
from foretell.engine.request_builder import RequestBuilder, RequestLimits
from foretell.engine.scheduler import Scheduler
from foretell.engine.sequence_state import SequenceState
from foretell.kernels.quant import QuantFormat
from foretell.kv.prefix import PrefixIndex
from foretell.models.config import LayerSizes, ModelConfig, Rope
from foretell.models.decoder import Decoder, first_layers
from foretell.models.draft_heads import (
    AssistantConfig,
    BlockConfig,
    DistilledConfig,
    DraftHead,
    EagleConfig,
    HeadConfig,
    LayerConfig,
    MedusaConfig,
    MtpConfig,
    TargetWeights,
    make_head,
)
from foretell.models.draft_heads.layer import init_weights
from foretell.models.draft_heads.loading import pack_head
from foretell.models.quantize import quantized_copy
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Budget, Draft, DrafterTraits, Sequence, SpeculationChoice

VOCAB = 32
CONTEXT = 256
CONFIG = ModelConfig(vocab=VOCAB, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, context=CONTEXT)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 4, 5, 6, 7, 4, 5], [9], [3] * 8, [4, 5, 6, 7, 4, 5, 6, 7, 8, 8, 9]]


def tiny_decoder(seed: int = 0, config: ModelConfig = CONFIG) -> Decoder:
    """Return a decoder whose logits differ by far more than float rounding errors."""
    return random_decoder(config, seed, 0.3)


@dataclass(frozen=True)
class World:
    """The settings of an engine, without the drafter."""

    page_size: int = 4
    pages: int = 256
    max_num_seqs: int = 16
    max_step_tokens: int = 64
    prefix_cache: bool = True
    budget: int = 6
    levels: int = 0  # the longest branch of a draft; 0: as long as there are nodes
    config: ModelConfig = field(default=CONFIG)
    device: str = "cpu"
    kv_dtype: torch.dtype | None = None  # None: the model's

    def engine(self, drafter: Drafter | None = None) -> Engine:
        model = tiny_decoder(config=self.config).to(self.device)
        variant = drafter.make(model) if isinstance(drafter, OwnVariant) else None  # before the weights are packed
        drafters = [] if drafter is None else list(MixDrafter.of(drafter).drafters.values())
        heads = [each for each in drafters if isinstance(each, OwnHead)]
        taps = tuple(sorted({tap for each in heads for tap in each.traits.hidden_layers}))
        shapes = tuple(shape for arm in heads for shape in arm.head_layer_shapes)
        lender = TargetWeights.of(model)  # before the weights are packed
        runner = ModelRunner(model, self.pages, self.page_size, CONTEXT, taps, shapes, self.kv_dtype)
        first = self.config.layers
        for arm in heads:
            arm.bind(runner, lender, first)
            first += len(arm.head_layer_shapes)
        prefix = PrefixIndex(runner.pool) if self.prefix_cache else None
        scheduler = Scheduler(runner, prefix, self.max_num_seqs, self.max_step_tokens)
        kind = Turns if isinstance(drafter, MixDrafter) else FixedController
        controller = kind(self.budget, self.levels)
        engine = Engine(runner, drafter or MixDrafter([]), controller, scheduler)
        if isinstance(drafter, OwnVariant) and variant is not None:
            drafter.bind(runner, variant)
        return engine


class Turns(FixedController):
    """Alternates between the drafters of a mix, so that each sees sequences that advanced without it."""

    def __init__(self, nodes: int, levels: int = 0) -> None:
        super().__init__(nodes, levels)
        self.step = 0

    def wants_free_drafts(self, seqs: list[Sequence]) -> tuple[list[Sequence], int]:
        return (seqs[::2], self.num_tokens - 1) if self.step % 3 else ([], 0)

    def choose_draft_lengths(self, seqs: list[Sequence], offers: FreeDrafts) -> list[Budget]:
        self.step += 1
        choices = [seq.request.drafters or ("",) for seq in seqs]
        arms = [names[(self.step + seq.id) % len(names)] for seq, names in zip(seqs, choices, strict=True)]
        return [self._budget(seq, arm) for seq, arm in zip(seqs, arms, strict=True)]


def model_drafter(
    seed: int = 0, pages: int = 256, device: str = "cpu", kv_dtype: torch.dtype | None = None, **settings: object
) -> ModelDrafter:
    """Return a drafter with a tiny draft model; with seed 0 it equals the target."""
    runner = ModelRunner(tiny_decoder(seed).to(device), pages, 4, CONTEXT, kv_dtype=kv_dtype)
    return ModelDrafter(runner, VOCAB, **settings)  # type: ignore[arg-type]


class OwnVariant(Wrapper):
    """A variant of the target as draft model; bound to an engine when that is built, because it shares its pages."""

    def __init__(self, name: str, make: Callable[[Decoder], Decoder]) -> None:
        super().__init__(MixDrafter([]))
        self.name, self.make = name, make
        self.traits = DrafterTraits(samples=True, gives_probability=True)

    def bind(self, runner: ModelRunner, variant: Decoder) -> None:
        self.wrap(SelfDrafter(runner.with_variant(variant), VOCAB, self.name))


class OwnHead(Wrapper):
    """A draft head over the target's hidden states; bound to an engine when that is built, like `OwnVariant`."""

    def __init__(self, config: HeadConfig, seed: int = 0, packed: bool = False, **settings: object) -> None:
        """`packed`: with packed weights, as they are served, and so with native kernels where there are any."""
        super().__init__(MixDrafter([]))
        self.config, self.seed, self.packed, self.settings = config, seed, packed, settings
        self.name, self.head_layer_shapes = config.kind, head_layer_shapes(config)
        self.traits = DrafterTraits(hidden_layers=config.hidden_layers, samples=True, gives_probability=True)

    def bind(self, runner: ModelRunner, lender: TargetWeights, first: int) -> None:
        head = random_head(self.config, lender, self.seed)
        if self.packed:
            pack_head(head, runner.model)
        self.wrap(head_drafter(runner, head, first, self.name, **self.settings))  # type: ignore[arg-type]


def random_head(config: HeadConfig, lender: TargetWeights, seed: int = 0, spread: float = 0.2) -> DraftHead[Any]:
    """Return a head with random weights; with a draft vocabulary, of random tokens."""
    head = make_head(config)
    generator = torch.Generator().manual_seed(seed)
    init_weights(head, generator, spread=spread)
    if config.draft_vocab is not None:
        head.draft_ids.copy_(torch.randperm(config.vocab, generator=generator)[: config.draft_vocab].sort().values)
    head.to(lender.embed.device)
    head.share_weights(lender)
    head.prepare(CONTEXT)
    return head


LAYER = LayerConfig(width=32, heads=4, kv_heads=2, head_dim=8, ffn=48)
SMALLER = replace(LAYER, width=16, ffn=24)
ASSISTANT = ModelConfig(
    vocab=VOCAB, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, context=CONTEXT, windows=(6, None),
    ropes=(Rope(), Rope(1000.0)),
    qk_norm=True, sandwich_norms=True, layer_scales=True,
    layer_sizes=(LayerSizes(2, 8, 24, 0), LayerSizes(2, 8, 24, 1)),
)  # fmt: skip
HEADS: dict[str, HeadConfig] = {
    "eagle": EagleConfig(LAYER, VOCAB, 32, (0, 1, 2), draft_vocab=24, fc_norm=True, norm_output=True),
    "eagle of two layers": EagleConfig(LAYER, VOCAB, 32, (1, 2), layers=2, norm_before_residual=True),
    "eagle 1": EagleConfig(LAYER, VOCAB, 32, (2,), target_norm=True, generation=1, fc_bias=True),
    "eagle with a window": EagleConfig(replace(LAYER, window=5), VOCAB, 32, (2,), norm_before_fc=True),
    "mtp": MtpConfig(LAYER, VOCAB, 32, (2,), target_norm=True),
    "block": BlockConfig(LAYER, VOCAB, 32, (1, 2), draft_vocab=24, layers=2, block=4, markov_rank=4, confidence=True),
    "block that looks back": BlockConfig(
        LAYER, VOCAB, 32, (0, 2), layers=2, block=4, markov_rank=4, confidence=True, fc_norm=True, look_back=4,
        anchored=True,
    ),
    "causal block": BlockConfig(
        replace(LAYER, qk_norm=True, window=6), VOCAB, 32, (2,), block=5, sample_from_anchor=False, mask_token=3,
        causal_in_block=True,
    ),
    "medusa": MedusaConfig(LAYER, VOCAB, 32, (2,), target_norm=True, draft_vocab=24),
    "distilled": DistilledConfig(LAYER, VOCAB, 32, (0,), draft_vocab=24, layers=2),
    "assistant": AssistantConfig(
        SMALLER, VOCAB, 32, (2,), target_norm=True, own_output=True, decoder=ASSISTANT,
    ),
    "assistant with clusters": AssistantConfig(
        SMALLER, VOCAB, 32, (2,), target_norm=True, own_output=True, decoder=ASSISTANT, centroids=8, active_centroids=3,
    ),
}  # fmt: skip


def fitting(config: HeadConfig, target: ModelConfig) -> HeadConfig:
    """Return the config of a head for this target; an assistant has the heads of the target's last layers."""
    if not isinstance(config, AssistantConfig):
        return replace(config, target_width=target.width, hidden_layers=(target.layers,))
    read = [layer for layer in range(target.layers) if not _is_shared(target, layer)][-2:]
    sizes = tuple(LayerSizes(target.at(i).kv_heads, target.at(i).head_dim, 24, i) for i in read)
    decoder = replace(config.decoder, layer_sizes=sizes, heads=target.heads)
    return replace(config, target_width=target.width, hidden_layers=(target.layers,), decoder=decoder)


def _is_shared(config: ModelConfig, layer: int) -> bool:
    return bool(config.layer_sizes) and config.layer_sizes[layer].kv_layer is not None


# Heads with a cache of their own; for an assistant there are no native kernels and no CUDA graphs.
WITH_CACHE = {name: config for name, config in HEADS.items() if not isinstance(config, AssistantConfig)}


def early_exit() -> OwnVariant:
    return OwnVariant("exit:1", lambda model: first_layers(model, 1))


def quantized_self(format: QuantFormat) -> OwnVariant:
    return OwnVariant(f"self:{format}", lambda model: quantized_copy(model, format))


def add(
    engine: Engine, name: str, prompt: list[int], speculation: SpeculationChoice = SpeculationChoice(), **params: object
) -> list[SequenceState]:
    given = {name: tuple(params.pop(name, ())) for name in ("prediction", "reference")}  # type: ignore[arg-type]
    maker = RequestBuilder(RequestLimits(CONTEXT, frozenset({0}), VOCAB), None, engine.drafter)
    wanted = SamplingParams(**{"max_tokens": 24, "seed": int(name), **params})  # type: ignore[arg-type]
    requests = maker.make(name, prompt, wanted, speculation)
    return [engine.add(replace(request, **given)) for request in requests]


def run(engine: Engine, after_step: Callable[[Engine], None] = lambda engine: None) -> None:
    for _ in range(10_000):
        if not engine.busy:
            assert engine.stats.drafter_failures == 0, "no drafter failed on the way"
            return
        engine.step()
        check_pages(engine)
        after_step(engine)
    raise AssertionError("the engine never finished")


def generate(
    drafter: Drafter | None = None,
    world: World = World(),
    after_step: Callable[[Engine], None] = lambda engine: None,
    prompts: list[list[int]] = PROMPTS,
    **params: object,
) -> list[list[int]]:
    """Return the output tokens of each prompt, generated in one batch."""
    engine = world.engine(drafter)
    states = [state for i, prompt in enumerate(prompts) for state in add(engine, str(i), prompt, **params)]
    run(engine, after_step)
    assert engine.runner.pool.num_held == 0, "all pages are free"
    return [state.seq.tokens[len(state.seq.request.prompt) :] for state in states]


def check_pages(engine: Engine) -> None:
    """Check that every page has as many holders as sequences that list it."""
    pool = engine.runner.pool
    pool.check()
    held: dict[int, int] = {}
    for state in engine.states.values():
        assert len(set(state.seq.pages)) == len(state.seq.pages)
        for page in state.seq.pages:
            held[page] = held.get(page, 0) + 1
    assert held == {page: count for page, count in enumerate(pool._references) if count}


def random_tree(seq: Sequence, budget: Budget) -> Draft:
    """Return a tree of random shape and tokens."""
    rng = random.Random(len(seq.tokens) * 31 + seq.id)
    tokens = tuple(rng.randrange(VOCAB) for _ in range(budget.nodes))
    return Draft(tokens, tuple(rng.randrange(-1, i) for i in range(budget.nodes)), "tree")


def tree_around(truth: list[list[int]]) -> ScriptedDrafter:
    """Return a drafter whose correct tokens come second, after a wrong sibling: accepting them moves their KV."""

    def propose(seq: Sequence, budget: Budget) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        for token in truth[seq.id][seq.num_output_tokens :][: budget.nodes // 2]:
            parents += [len(tokens) - 1] * 2
            tokens += [(token + 1) % VOCAB, token]
        return Draft(tuple(tokens), tuple(parents), "tree")

    return ScriptedDrafter(propose)
