"""The first law, losslessness: a draft may change how fast tokens come, never which."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from foretell.draft.base import Drafter
from foretell.draft.corpus.context_index import ContextIndex
from foretell.draft.corpus.drafter import CorpusDrafter
from foretell.draft.lookahead import LookaheadDrafter
from foretell.draft.mix import MixDrafter
from foretell.draft.ngram import NGramDrafter
from foretell.draft.predicted_output import PredictedOutputDrafter
from foretell.draft.scripted import OracleDrafter, ScriptedDrafter
from foretell.draft.suffix import SuffixDrafter
from foretell.draft.token_recycling import TokenRecyclingDrafter
from foretell.engine.engine import Engine
from foretell.models.config import ModelConfig
from foretell.types import SpeculationChoice
from tests.draft.corpora import FixedCorpus
from tests.draft.tiny_tokenizers import string_translator, token_translator
from tests.tiny import (
    CONFIG,
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

Truth = list[list[int]]


def oracle(truth: Truth, error_rate: float) -> OracleDrafter:
    return OracleDrafter({tuple(p): t for p, t in zip(PROMPTS, truth, strict=True)}, VOCAB, error_rate)


class ChangingCorpus(FixedCorpus):
    """Files that change with every draft."""

    def indices(self, tenant: str) -> tuple[ContextIndex, ...]:
        self.advance()
        return super().indices(tenant)


# One row per drafter, made from the correct outputs, which oracles need.
DRAFTERS: dict[str, Callable[[Truth], Drafter]] = {
    "the same model": lambda truth: model_drafter(),
    "another model": lambda truth: model_drafter(seed=5),
    "another model, few pages": lambda truth: model_drafter(seed=5, pages=14),
    "ngram": lambda truth: NGramDrafter(1, 3),
    "suffix": lambda truth: SuffixDrafter(offset=2),
    "corpus": lambda truth: CorpusDrafter(FixedCorpus([*truth, *PROMPTS])),
    "corpus that changes": lambda truth: CorpusDrafter(ChangingCorpus(truth, [text[::-1] for text in truth], PROMPTS)),
    "early exit": lambda truth: early_exit(),
    "self int8": lambda truth: quantized_self("int8"),
    "self int4": lambda truth: quantized_self("int4"),
    "recycle": lambda truth: TokenRecyclingDrafter(),
    "lookahead": lambda truth: LookaheadDrafter(),
    "translated tokens": lambda truth: token_translator(),
    "translated strings": lambda truth: string_translator(),
    "mix": lambda truth: MixDrafter([NGramDrafter(1, 3), SuffixDrafter(offset=2), model_drafter(seed=5)]),
    "oracle": lambda truth: oracle(truth, 0.0),
    "oracle that errs": lambda truth: oracle(truth, 0.3),
    "always wrong": lambda truth: oracle(truth, 1.0),
    "random tree": lambda truth: ScriptedDrafter(random_tree),
    "tree around the output": tree_around,
}
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "top k": {"temperature": 0.7, "top_k": 5},
    "top p": {"temperature": 1.3, "top_p": 0.8},
    "min p": {"temperature": 1.0, "min_p": 0.1},
    "stop token": {"temperature": 1.0, "stop_token_ids": [7, 8], "ignore_eos": True},
}
WORLDS = {
    "page 4": World(),
    "page 1": World(page_size=1, pages=600),
    "page 16, short steps": World(page_size=16, pages=40, max_step_tokens=16),
    "few pages": World(page_size=4, pages=12, max_num_seqs=5),
    "one at a time": World(max_num_seqs=1),
    "no prefix cache": World(prefix_cache=False),
}
_truths: dict[str, Truth] = {}


def truth_for(sampling: str) -> Truth:
    """Return the outputs without a drafter, one sequence at a time."""
    if sampling not in _truths:
        _truths[sampling] = [_alone(i, prompt, SAMPLING[sampling]) for i, prompt in enumerate(PROMPTS)]
    return _truths[sampling]


def _alone(i: int, prompt: list[int], params: dict[str, object]) -> list[int]:
    engine = World(prefix_cache=False).engine()
    (state,) = add(engine, str(i), prompt, **params)
    run(engine)
    return state.seq.tokens[len(prompt) :]


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_a_draft_never_changes_the_output(make: Callable[[Truth], Drafter], sampling: str, world: World) -> None:
    truth = truth_for(sampling)
    assert generate(make(truth), world, **SAMPLING[sampling]) == truth


@pytest.mark.parametrize("sampling", SAMPLING)
def test_batching_never_changes_the_output(sampling: str) -> None:
    assert generate(MixDrafter([]), **SAMPLING[sampling]) == truth_for(sampling)


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_preemption_at_any_moment_changes_nothing(make: Callable[[Truth], Drafter], sampling: str) -> None:
    truth = truth_for(sampling)
    rng = random.Random(0)

    def preempt_some(engine: Engine) -> None:
        for seq in list(engine.scheduler.running):
            if rng.random() < 0.2:
                engine.scheduler.preempt(seq)

    for world in (World(), World(prefix_cache=False)):
        assert generate(make(truth), world, preempt_some, **SAMPLING[sampling]) == truth


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_an_abort_affects_no_other_sequence(make: Callable[[Truth], Drafter]) -> None:
    truth = truth_for("sampled")
    for num_steps in range(6):
        engine = World().engine(make(truth))
        states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, temperature=1.0)]
        for _ in range(num_steps):
            engine.step()
        for aborted in ("1", "3"):
            engine.abort(aborted)
        run(engine)
        assert engine.runner.pool.num_held == 0
        for i in (0, 2, 4):
            assert states[i].seq.tokens[len(PROMPTS[i]) :] == truth[i]


def test_good_drafts_save_steps() -> None:
    truth = truth_for("sampled")
    for make in (lambda: oracle(truth, 0.0), lambda: tree_around(truth)):
        plain, drafted = World().engine(), World().engine(make())
        for engine in (plain, drafted):
            for i, prompt in enumerate(PROMPTS):
                add(engine, str(i), prompt, temperature=1.0)
            run(engine)
        assert drafted.stats.forwards <= plain.stats.forwards / 2


def test_the_prefix_cache_never_changes_the_output() -> None:
    prompts = [[*range(1, 18), i] for i in range(1, 4)]
    cold = generate(MixDrafter([]), World(prefix_cache=False), prompts=prompts, temperature=1.0)
    engine = World().engine(NGramDrafter(1, 3))
    for _ in range(2):
        warm = [state for i, prompt in enumerate(prompts) for state in add(engine, str(i), prompt, temperature=1.0)]
        run(engine)
        assert [state.seq.tokens[18:] for state in warm] == cold
    assert all(state.cached_prompt_tokens == 16 for state in warm), "the second time every full page was found"


def test_tenants_do_not_share_a_prefix() -> None:
    engine = World().engine()
    prefix = engine.scheduler.prefix
    assert prefix is not None
    add(engine, "0", list(range(1, 20)))
    run(engine)
    pages = prefix.match(list(range(1, 20)), "")
    assert len(pages) == 4
    engine.runner.pool.release(pages)
    assert prefix.match(list(range(1, 20)), "another tenant") == []


def test_speculation_can_be_switched_off_for_one_request() -> None:
    truth = truth_for("greedy")
    engine = World().engine(oracle(truth, 0.0))
    (off,) = add(engine, "0", PROMPTS[0], SpeculationChoice(enabled=False))
    (short,) = add(engine, "1", PROMPTS[1], SpeculationChoice(max_draft=2))
    run(engine)
    assert off.speculation.drafted == 0
    assert off.speculation.steps == off.speculation.tokens
    assert 0 < short.speculation.accepted_per_step <= 3


def test_choices_of_one_request_differ_only_in_their_noise() -> None:
    engine = World().engine(NGramDrafter(1, 3))
    states = add(engine, "5", list(range(1, 20)), temperature=1.0, n=3)
    run(engine)
    outputs = [state.seq.tokens[19:] for state in states]
    assert len({tuple(output) for output in outputs}) == 3
    assert outputs[0] == _alone(5, list(range(1, 20)), {"temperature": 1.0}), "choice 0 samples with the seed itself"
    assert [state.cached_prompt_tokens for state in states] == [0, 16, 16], "the prompt ran once"


def preempt_youngest(engine: Engine) -> None:
    if len(engine.scheduler.running) > 1 and engine.stats.forwards % 3 == 0:
        engine.scheduler.preempt(engine.scheduler.running[-1])


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_prediction_never_changes_the_output(sampling: str, world: World) -> None:
    """Correct, with every fifth token wrong, and entirely wrong; with preemption."""
    truth = truth_for(sampling)
    for spoil in (lambda i: False, lambda i: i % 5 == 2, lambda i: True):
        engine = world.engine(PredictedOutputDrafter())
        states = [
            state
            for i, (prompt, output) in enumerate(zip(PROMPTS, truth, strict=True))
            for state in add(
                engine,
                str(i),
                prompt,
                prediction=[(token + spoil(at)) % VOCAB for at, token in enumerate(output)],
                **SAMPLING[sampling],
            )
        ]
        run(engine, preempt_youngest)
        assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
        assert engine.runner.pool.num_held == 0


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_reference_never_changes_the_output(sampling: str) -> None:
    """Correct, with every fifth token wrong, and with preemption."""
    truth = truth_for(sampling)
    for spoil in (lambda i: False, lambda i: i % 5 == 2):
        engine = World().engine(SuffixDrafter())
        states = [
            state
            for i, (prompt, output) in enumerate(zip(PROMPTS, truth, strict=True))
            for state in add(
                engine,
                str(i),
                prompt,
                reference=[(token + spoil(at)) % VOCAB for at, token in enumerate(output)],
                **SAMPLING[sampling],
            )
        ]
        run(engine, preempt_youngest)
        assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in states] == truth
        assert sum(state.speculation.accepted for state in states) > len(PROMPTS)
        assert engine.runner.pool.num_held == 0


FAMILIES = {
    "windows": ModelConfig(
        vocab=VOCAB, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn=48, context=256, windows=(5, None, 5)
    ),
    "norms": ModelConfig(
        vocab=VOCAB, width=32, layers=2, heads=4, kv_heads=1, head_dim=8, ffn=48, context=256, qk_norm=True,
        sandwich_norms=True, embed_scale=5.6, activation="gelu_tanh", tied=False, qkv_bias=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_every_kind_of_decoder_is_lossless(config: ModelConfig) -> None:
    truth = generate(MixDrafter([]), World(config=config), temperature=1.0)
    assert truth != generate(MixDrafter([]), World(config=CONFIG), temperature=1.0)
    for make in DRAFTERS.values():
        assert generate(make(truth), World(config=config), temperature=1.0) == truth
