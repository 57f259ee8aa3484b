"""Families on a CUDA device: the output of a CPU, with drafts and without, in Triton kernels or in torch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.draft.ngram import NGramDrafter
from foretell.engine.engine import Engine
from foretell.models.hf_config import from_hf
from tests.tiny import CONTEXT, HEADS, VOCAB, OwnHead, World, fitting, generate, tree_around

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "sliding_window": 9,
    "head_dim": 16,
}
HALVES = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "layer_types": HALVES,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 9.0,
    },
    "gemma4_unified_text": {"layer_types": HALVES, "global_head_dim": 32, "attention_k_eq_v": True},
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    "gemma3_text": {},
    "olmo2": {},
    "exaone4": {},
    "smollm3": {},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_draft_changes_the_output(name: str) -> None:
    config = from_hf(SIZES | {"model_type": name} | FAMILIES[name])
    params = {"temperature": 1.0, "max_tokens": 12}
    truth = generate(world=World(config=config, prefix_cache=False, max_num_seqs=1), **params)
    world, rng = World(config=config, device="cuda", pages=64, max_num_seqs=5), random.Random(0)

    def preempt_some(engine: Engine) -> None:
        for seq in list(engine.scheduler.running):
            if rng.random() < 0.2:
                engine.scheduler.preempt(seq)

    drafters: list[Drafter | None] = [None, NGramDrafter(1, 3), tree_around(truth), OwnHead(HEADS["eagle"])]
    if name.startswith("gemma4"):
        drafters += [OwnHead(fitting(config_of, config)) for kind, config_of in HEADS.items() if "assist" in kind]
    for drafter in drafters:
        for each in (world, replace(world, levels=3, budget=9)):
            assert generate(drafter, each, preempt_some, **params) == truth
