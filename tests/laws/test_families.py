"""Losslessness holds for every model family: with drafts, in a batch, with few pages and preemption."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from foretell.draft.base import Drafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.engine.engine import Engine
from foretell.models.hf_config import from_hf
from tests.laws.test_losslessness import DRAFTERS, SAMPLING, WORLDS, Truth
from tests.models import families
from tests.tiny import (
    HEADS,
    VOCAB,
    WITH_CACHE,
    OwnHead,
    World,
    early_exit,
    fitting,
    generate,
    quantized_self,
    tree_around,
)

NAMES = (
    "llama",
    "mistral, sliding",
    "qwen2, sliding from layer 1",
    "qwen3",
    "gemma3",
    "internlm3",
    "granite 4, no RoPE",
    "phi3, long factors",
    "granite",
    "gemma2",
    "gemma4",
    "gemma4, values are keys",
    "gemma4 unified",
    "smollm3",
    "olmo2",
    "olmo3",
    "exaone4",
    "seed_oss",
    "ministral3",
)
FEW: dict[str, Callable[[Truth], Drafter]] = {
    "free": lambda truth: MixDrafter([NGramDrafter(1, 3), SuffixDrafter(offset=2)]),
    "tree around the output": tree_around,
    "early exit": lambda truth: early_exit(),
    "self int8": lambda truth: quantized_self("int8"),
    "eagle": lambda truth: OwnHead(HEADS["eagle"]),
}
ASSISTANTS = [name for name in NAMES if name.startswith("gemma4")]
SAMPLED = {"temperature": 1.0, "max_tokens": 12}
# All others, with all families, settings and worlds, are thousands of combinations: a few at random for each family.
OTHERS: dict[str, Callable[[Truth], Drafter]] = {
    **{name: make for name, make in DRAFTERS.items() if name not in FEW},
    "self int4": lambda truth: quantized_self("int4"),
    **{name: lambda truth, each=config: OwnHead(each) for name, config in WITH_CACHE.items() if name != "eagle"},  # type: ignore[misc]
}
CASES_PER_FAMILY = 6
CHOICE = random.Random(34)
SHUFFLED = CHOICE.sample(list(OTHERS), len(OTHERS)) * CASES_PER_FAMILY
CASES = [
    (name, SHUFFLED[CASES_PER_FAMILY * i + turn], CHOICE.choice(list(SAMPLING)), CHOICE.choice(list(WORLDS)))
    for i, name in enumerate(NAMES)
    for turn in range(CASES_PER_FAMILY)
]


def world(name: str, **settings: object) -> World:
    config = from_hf(families.MODELS[name][1].to_dict())
    config = replace(config, vocab=VOCAB, per_layer_vocab=config.per_layer_width and VOCAB)
    return replace(World(config=config), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_no_draft_and_no_batch_changes_the_output(name: str) -> None:
    truth = generate(world=world(name, prefix_cache=False, max_num_seqs=1), **SAMPLED)
    rng = random.Random(0)

    def preempt_some(engine: Engine) -> None:
        for seq in list(engine.scheduler.running):
            if rng.random() < 0.2:
                engine.scheduler.preempt(seq)

    drafters = [make(truth) for make in FEW.values()]
    if name in ASSISTANTS:
        drafters += [
            OwnHead(fitting(HEADS[each], world(name).config), packed=True) for each in HEADS if "assist" in each
        ]
    for drafter in drafters:
        assert generate(drafter, world(name, pages=16, max_num_seqs=5), preempt_some, **SAMPLED) == truth


def test_every_drafter_sampling_and_world_meets_several_families() -> None:
    for at, every in ((1, OTHERS), (2, SAMPLING), (3, WORLDS)):
        counts = Counter(case[at] for case in CASES)
        assert counts.keys() == every.keys() and min(counts.values()) >= 3


@pytest.mark.parametrize(("name", "drafter", "sampling", "where"), CASES)
def test_no_drafter_changes_the_output_of_a_family(name: str, drafter: str, sampling: str, where: str) -> None:
    params = {**SAMPLING[sampling], "max_tokens": 12}
    truth = generate(world=world(name, prefix_cache=False, max_num_seqs=1), **params)
    served = replace(WORLDS[where], config=world(name).config)
    assert generate(OTHERS[drafter](truth), served, **params) == truth
