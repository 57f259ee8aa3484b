"""Losslessness holds for every quantized format: with each drafter, sampling setting and way to serve.

All combinations are thousands. A few at random for each format let most pairs of settings meet.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import LLM, SamplingParams
from foretell.engine.engine import Engine
from foretell.hub import open_checkpoint
from foretell.models.draft_heads import (
    BlockConfig,
    EagleConfig,
    HeadConfig,
    LayerConfig,
    MedusaConfig,
    make_head,
    write_head,
)
from foretell.models.draft_heads.layer import init_weights
from foretell.models.hf_config import read_config
from tests.folder import write_tiny_folder
from tests.hub.formats import FORMATS
from tests.quantized_folder import SHAPE, write_quantized_folder

TEXT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
PROMPTS = [TEXT, "She sells sea shells", TEXT + " jumps", "by the sea shore. She"]
LAYER = LayerConfig(width=64, heads=4, kv_heads=2, head_dim=16, ffn=96)
DRAFTERS = (
    *("suffix", "eagle:{heads}/eagle", "self:int8", "recycle", "medusa:{heads}/medusa", "exit:1", "model:{draft}"),
    *("ngram", "block:{heads}/block", "self:int4", "lookahead"),
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2},
)
SERVED: dict[str, dict[str, Any]] = {
    "default": {},
    "preempted": {"page_size": 4},
    "no prefix cache": {"prefix_cache": False, "max_num_batched_tokens": 32, "max_num_seqs": 4},
    "trees": {"tree_nodes": 6},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "exact": {"quantization": "none"},
    "int4": {"quantization": "int4", "max_num_seqs": 2},
}
WAYS = list(SERVED)
CASES_PER_FORMAT = 4
CHOICE = random.Random(34)
CASES = list(
    dict.fromkeys(
        (name, CHOICE.choice(DRAFTERS), CHOICE.randrange(len(SAMPLING)), CHOICE.choice(WAYS))
        for name in FORMATS
        for _ in range(CASES_PER_FORMAT)
    )
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders with a draft model, and with a random head of each kind."""
    folder = tmp_path_factory.mktemp("drafts")
    draft = write_tiny_folder(folder / "draft", seed=1, shape=SHAPE)
    vocab = read_config(open_checkpoint(draft)).vocab
    configs: list[HeadConfig] = [
        EagleConfig(LAYER, vocab, 64, (0, 1, 2), fc_norm=True, norm_output=True),
        BlockConfig(LAYER, vocab, 64, (1, 2), block=4, markov_rank=4, confidence=True),
        MedusaConfig(LAYER, vocab, 64, (2,), target_norm=True),
    ]
    for config in configs:
        head = make_head(config)
        init_weights(head, torch.Generator().manual_seed(0), spread=0.2)
        write_head(head, folder / "heads" / config.kind)
    return {"draft": draft, "heads": folder / "heads"}


def generate(folder: Path, drafter: str, sampling: dict[str, Any], settings: dict[str, Any]) -> tuple[list[Any], LLM]:
    llm = LLM(folder, drafter=drafter, quiet=True, keep_packed=False, **settings)
    if settings.get("page_size") == 4:
        preempt_some(llm.engine)
    params = SamplingParams(max_tokens=16, seed=5, ignore_eos=True, **sampling)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)], llm


def preempt_some(engine: Engine) -> None:
    """Preempt the youngest sequence after every third step."""
    step, turn = engine.step, itertools.count()

    def stepped() -> Any:
        news = step()
        if next(turn) % 3 == 1 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        return news

    engine.step = stepped  # type: ignore[method-assign]


def test_every_drafter_and_every_way_to_serve_is_there() -> None:
    for at, every in ((1, set(DRAFTERS)), (2, set(range(len(SAMPLING)))), (3, set(SERVED))):
        assert {case[at] for case in CASES} == every
    assert len({(case[1], case[3]) for case in CASES}) > 0.6 * len(DRAFTERS) * len(SERVED), "most pairs meet"


@pytest.mark.parametrize(("name", "drafter", "sampling", "way"), CASES)
def test_no_draft_changes_the_output_of_a_format(
    name: str, drafter: str, sampling: int, way: str, places: dict[str, Path], tmp_path: Path
) -> None:
    folder, _ = write_quantized_folder(tmp_path, name)
    served = SERVED[way]
    alone = {key: value for key, value in served.items() if key in ("quantization", "kv_cache_dtype")}
    plain, _ = generate(folder, "none", SAMPLING[sampling], {**alone, "max_num_seqs": 1, "prefix_cache": False})
    asked = drafter.format(**places)
    found, llm = generate(folder, asked, SAMPLING[sampling], {"num_speculative_tokens": 3, **served})
    assert found == plain
    assert llm.engine.stats.drafter_failures == 0
    assert way != "preempted" or llm.engine.scheduler.preemptions > 0
    if asked not in ("ngram", "suffix"):  # these need a repetition
        assert llm.engine.stats.speculation.drafted > 0
