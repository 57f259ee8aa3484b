"""Heads are lossless, and their KV equals that of a fresh prefill."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.mix import MixDrafter
from foretell.engine.engine import Engine
from foretell.models.config import ModelConfig
from foretell.models.draft_heads import AssistantConfig, HeadConfig, TargetWeights
from foretell.runner.model_runner import ModelRunner
from foretell.types import Budget, Draft, ScheduledSequence, Sequence, SpeculationChoice, StepResult
from tests.laws.test_losslessness import FAMILIES, SAMPLING, WORLDS, oracle, preempt_youngest, truth_for
from tests.tiny import (
    CONFIG,
    CONTEXT,
    HEADS,
    PROMPTS,
    OwnHead,
    World,
    add,
    fitting,
    generate,
    run,
    tiny_decoder,
    tree_around,
)


def heads_and_a_seer(truth: list[list[int]]) -> MixDrafter:
    """A head next to other drafters, so that sequences grow by tokens the head did not draft."""
    names = {"eagle": False, "block": True, "medusa": False, "mtp": True}
    drafters: list[Drafter] = [OwnHead(HEADS[name], packed=packed) for name, packed in names.items()]
    seer = oracle(truth, 0.3)
    seer.name = "seer"
    return MixDrafter([*drafters, seer])


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_head_is_lossless(config: HeadConfig, world: World) -> None:
    """In torch, and with packed weights as it is served."""
    assert generate(OwnHead(config), world, temperature=1.0) == truth_for("sampled")
    assert generate(OwnHead(config, packed=True), world) == truth_for("greedy")


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_several_heads_are_lossless(sampling: str, world: World) -> None:
    truth = truth_for(sampling)
    assert generate(heads_and_a_seer(truth), world, **SAMPLING[sampling]) == truth


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
def test_heads_are_lossless_over_every_kind_of_decoder(family: ModelConfig, packed: bool) -> None:
    truth = generate(MixDrafter([]), World(config=family), temperature=1.0)
    for config in HEADS.values():
        config = fitting(config, family) if isinstance(config, AssistantConfig) else config
        assert generate(OwnHead(config, packed=packed), World(config=family), temperature=1.0) == truth


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_are_verified_under_other_rules(rule: str) -> None:
    """They sample other outputs than plain decoding, of the same distribution; they need draft probabilities."""
    engine = World().engine(OwnHead(HEADS["eagle"], packed=True))
    choice = SpeculationChoice(rule=rule)
    states = [add(engine, str(i), prompt, choice, temperature=1.0)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert engine.stats.speculation.drafted > 50 and all(state.seq.finish_reason for state in states)


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_preemption_and_aborts_change_nothing(config: HeadConfig) -> None:
    truth, rng = truth_for("sampled"), random.Random(0)

    def preempt_some(engine: Engine) -> None:
        for seq in list(engine.scheduler.running):
            if rng.random() < 0.2:
                engine.scheduler.preempt(seq)

    assert generate(OwnHead(config), World(), preempt_some, temperature=1.0) == truth
    for moment in range(4):
        drafter = OwnHead(config)
        engine = World().engine(drafter)
        states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, temperature=1.0)]
        for _ in range(moment):
            engine.step()
        engine.abort("1")
        run(engine)
        assert engine.runner.pool.num_held == 0
        assert [states[i].seq.tokens[len(PROMPTS[i]) :] for i in (0, 2, 3, 4)] == [truth[i] for i in (0, 2, 3, 4)]
        kept = (drafter.inner._pending, getattr(drafter.inner, "_states", {}))  # type: ignore[attr-defined]
        assert not any(kept), "no state of finished sequences is kept"


class Scratch:
    """A head that prefills a whole sequence at once, from its tokens alone."""

    def __init__(self, config: HeadConfig, page_size: int, packed: bool) -> None:
        model = tiny_decoder()
        head, lender = OwnHead(config, packed=packed), TargetWeights.of(model)
        self.runner = ModelRunner(model, 256, page_size, CONTEXT, config.hidden_layers, head.head_layer_shapes)
        head.bind(self.runner, lender, CONFIG.layers)
        assert isinstance(head.inner, HeadDrafter)
        self.drafter = head.inner

    def read(self, seq: Sequence) -> Sequence:
        mine = Sequence(seq.id, seq.request, list(seq.tokens))
        assert self.runner.reserve(mine, len(mine.tokens) + 8)
        share = ScheduledSequence.of(mine, len(mine.tokens) - 1)
        output = self.runner.forward([share], [Draft()])
        mine.num_computed_tokens = share.num_new_tokens
        self.drafter.update_kv([StepResult(share, hidden_states=output.hidden_states)])
        return mine

    def draft_for(self, seq: Sequence, budget: Budget) -> tuple[Draft, list[torch.Tensor]]:
        mine = self.read(seq)
        (draft,) = self.drafter.propose([mine], [budget])
        kept = remembered(self.drafter, mine)
        self.drafter.forget(mine)
        self.runner.trim(mine, 0)
        return draft, kept


def remembered(drafter: HeadDrafter, seq: Sequence) -> list[torch.Tensor]:
    """Return the head's KV of all cached positions, in all of its layers."""
    pages = drafter.pages
    slots = pages.slots(seq, 1, len(seq.tokens) - 1)
    found = [t.flatten(0, 1)[slots].clone() for t in (*pages.keys, *pages.values)]
    return (
        found if pages.hidden_state_cache is None else [*found, pages.hidden_state_cache.flatten(0, 1)[slots].clone()]
    )


class Compared(OwnHead):
    """Alternates with another drafter, and compares the head's drafts and KV with those of a fresh one."""

    def __init__(self, config: HeadConfig, page_size: int, other: Drafter, packed: bool = False) -> None:
        super().__init__(config, packed=packed)
        self.scratch, self.other = Scratch(config, page_size, packed), other
        self.turn = self.compared = 0

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        self.turn += 1
        if self.turn % 3 == 0:  # the sequences grow by more than this head drafts right
            return self.other.propose(seqs, budgets)
        drafts = self.inner.propose(seqs, budgets)
        assert isinstance(self.inner, HeadDrafter)
        for seq, budget, draft in zip(seqs, budgets, drafts, strict=True):
            if budget.nodes:
                fresh, kept = self.scratch.draft_for(seq, budget)
                assert len(draft) > 0 and draft.tokens == fresh.tokens
                for mine, theirs in zip(remembered(self.inner, seq), kept, strict=True):
                    assert torch.allclose(mine, theirs, atol=1e-5)
                self.compared += 1
        return drafts


PREEMPTIONS: dict[str, Callable[[Engine], None]] = {"": lambda engine: None, "preempted": preempt_youngest}


@pytest.mark.parametrize("world", ["page 4", "page 16, short steps", "page 1"])
@pytest.mark.parametrize("disturb", PREEMPTIONS.values(), ids=PREEMPTIONS)
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_drafts_and_kv_depend_on_the_tokens_alone(
    config: HeadConfig, disturb: Callable[[Engine], None], world: str
) -> None:
    truth = truth_for("sampled")
    compared = Compared(config, WORLDS[world].page_size, tree_around(truth))
    assert generate(compared, WORLDS[world], disturb, temperature=1.0) == truth
    assert compared.compared > 20


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_drafts_and_kv_of_packed_heads_depend_on_the_tokens_alone(config: HeadConfig) -> None:
    truth = truth_for("sampled")
    for disturb in PREEMPTIONS.values():
        compared = Compared(config, 4, tree_around(truth), packed=True)
        assert generate(compared, World(), disturb, temperature=1.0) == truth
        assert compared.compared > 20
    greedy = Compared(config, 16, tree_around(truth_for("greedy")), packed=True)
    assert generate(greedy, WORLDS["page 16, short steps"], preempt_youngest) == truth_for("greedy")


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_prefix_cache_hit_includes_the_kv_of_the_head(config: HeadConfig) -> None:
    """Also if the prefix is of a sequence without drafts."""
    prompts = [[*range(1, 18), i] for i in range(1, 4)]
    cold = generate(MixDrafter([]), World(prefix_cache=False), prompts=prompts, temperature=1.0)
    compared = Compared(config, 4, oracle([[]] * 5, 1.0))
    engine = World().engine(compared)
    off = add(engine, "7", prompts[0], temperature=1.0)[0]
    off.seq.request = type(off.seq.request)(**{**vars(off.seq.request), "drafters": ()})
    run(engine)
    assert compared.compared == 0
    states = [state for i, prompt in enumerate(prompts) for state in add(engine, str(i), prompt, temperature=1.0)]
    run(engine)
    assert [state.seq.tokens[18:] for state in states] == cold
    assert all(state.cached_prompt_tokens == 16 for state in states)
    assert compared.compared > 10


def test_sampled_drafts_have_probabilities() -> None:
    engine = World().engine(drafter := OwnHead(HEADS["eagle"]))
    by_rejection = SpeculationChoice(rule="rejection")
    states = [add(engine, str(i), PROMPTS[i], by_rejection, temperature=t)[0] for i, t in ((0, 0.0), (1, 1.0))]
    while any(state.seq.pending > 1 or not state.seq.num_output_tokens for state in states):
        engine.step()
    seqs = [state.seq for state in states]
    for seq in seqs:
        assert engine.runner.reserve(seq, len(seq.tokens) + 4)
    greedy, sampled = drafter.propose(seqs, [Budget(4)] * 2)
    assert not any(greedy.sampled or ()) and sampled.sampled == (True,) * 4
    assert sampled.probs is not None and torch.allclose(sampled.probs.sum(-1), torch.ones(4))
    assert isinstance(drafter.inner, HeadDrafter)
    known = set(drafter.inner.head.draft_ids.tolist())
    assert set(sampled.probs.sum(0).nonzero()[:, 0].tolist()) <= known, (
        "tokens outside the draft vocabulary have no probability"
    )
    assert all(sampled.probs[i, token] > 0 for i, token in enumerate(sampled.tokens))
    alone = drafter.propose(seqs[:1], [Budget(4)])[0]
    assert alone.tokens == greedy.tokens and alone.probs is None, "a greedy draft has no probabilities"
    assert alone.confidence == pytest.approx(greedy.confidence, rel=1e-4)


@pytest.mark.parametrize("config", [HEADS["eagle"], HEADS["block"]], ids=str)
def test_a_chain_ends_below_the_minimum_confidence(config: HeadConfig) -> None:
    engine = World().engine(drafter := OwnHead(config))
    (state,) = add(engine, "0", PROMPTS[1])
    while state.seq.pending > 1 or not state.seq.num_output_tokens:
        engine.step()
    assert engine.runner.reserve(state.seq, len(state.seq.tokens) + 4)
    whole = drafter.propose([state.seq], [Budget(4)])[0]
    assert whole.confidence is not None and len(whole) == 4
    floor = whole.confidence[0] * whole.confidence[1] * 1.01
    assert drafter.propose([state.seq], [Budget(4, min_probability=floor)])[0].tokens == whole.tokens[:2], (
        "the last one is kept"
    )
