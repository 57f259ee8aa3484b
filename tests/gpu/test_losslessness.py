"""Losslessness on a CUDA device, in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.draft.lookahead import LookaheadDrafter
from foretell.draft.mix import MixDrafter
from foretell.draft.model_graph import GraphModelDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.scripted import ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.types import SpeculationChoice
from tests.draft.tiny_tokenizers import token_translator
from tests.tiny import (
    PROMPTS,
    VOCAB,
    World,
    add,
    early_exit,
    generate,
    model_drafter,
    quantized_self,
    random_tree,
    run,
    tree_around,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def chained_drafter() -> GraphModelDrafter:
    return GraphModelDrafter(model_drafter(seed=5, device="cuda").runner, VOCAB, "chained")


DRAFTERS: dict[str, Callable[[list[list[int]]], Drafter]] = {
    "ngram": lambda truth: NGramDrafter(1, 3),
    "model": lambda truth: model_drafter(seed=5, device="cuda"),
    "model, chains in one go": lambda truth: chained_drafter(),
    "suffix": lambda truth: SuffixDrafter(offset=2),
    "recycle": lambda truth: TokenRecyclingDrafter(),
    "lookahead": lambda truth: LookaheadDrafter(),
    "early exit": lambda truth: early_exit(),
    "itself in 8 bits": lambda truth: quantized_self("int8"),
    "itself in 4 bits": lambda truth: quantized_self("int4"),
    "translated": lambda truth: token_translator(device="cuda"),
    "mix": lambda truth: MixDrafter(
        [NGramDrafter(1, 3), TokenRecyclingDrafter(), model_drafter(seed=5, device="cuda")]
    ),
    "random tree": lambda truth: ScriptedDrafter(random_tree),
    "tree around the text": tree_around,
}
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "restricted": {"temperature": 1.2, "top_p": 0.9, "top_k": 9},
    "penalties": {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 2},
}
WORLDS = {"roomy": World(device="cuda"), "few pages": World(device="cuda", page_size=4, pages=12, max_num_seqs=5)}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_draft_does_not_change_the_output(
    make: Callable[[list[list[int]]], Drafter], sampling: str, world: World
) -> None:
    truth = generate(None, World(device="cuda"), **SAMPLING[sampling])
    assert generate(make(truth), world, **SAMPLING[sampling]) == truth
    assert generate(None, World(), **SAMPLING[sampling]) == truth, "the noise is the same on every device"


def test_a_sampled_chain_is_one_graph_and_samples_as_the_target_does() -> None:
    """A copy of the target drafts what the target samples, since both use the same noise."""
    from foretell.runner.cuda.executor import CudaExecutor

    runner = model_drafter(device="cuda").runner
    engine = World(device="cuda").engine(GraphModelDrafter(runner, VOCAB, "chained"))
    asked: dict[str, object] = {"temperature": 1.0, "max_tokens": 96, "ignore_eos": True}
    tracks = [add(engine, str(i), prompt, **asked)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    drafted, accepted = (sum(getattr(each.speculation, kind) for each in tracks) for kind in ("drafted", "accepted"))
    assert drafted and accepted > 0.9 * drafted
    assert isinstance(runner.executor, CudaExecutor)
    recordings = runner.executor.chains.graphs.graphs
    assert any(recorded is not None for recorded in recordings.values()) and all(sizes.sampled for sizes in recordings)


def test_rules_that_verify_by_distributions_run() -> None:
    for rule in ("rejection", "block", "ensemble"):
        engine = World(device="cuda").engine(model_drafter(seed=5, device="cuda"))
        tracks = add(engine, "1", PROMPTS[1], SpeculationChoice(rule=rule), temperature=1.0)
        run(engine)
        assert tracks[0].speculation.drafted > 0
