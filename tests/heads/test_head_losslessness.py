"""Heads obey the laws, and what they keep in the pages is what a fresh pass over the text would give."""

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
from foretell.models.draft_heads import HeadConfig, TargetWeights
from foretell.runner.model_runner import ModelRunner
from foretell.types import Budget, Draft, ScheduledSequence, Sequence, SpeculationChoice, StepResult
from tests.laws.test_losslessness import FAMILIES, SAMPLING, WORLDS, oracle, preempt_youngest, truth_for
from tests.tiny import CONFIG, CONTEXT, HEADS, PROMPTS, OwnHead, World, add, generate, run, tiny_decoder, tree_around


def heads_and_a_seer(truth: list[list[int]]) -> MixDrafter:
    """The texts move on by several tokens at a time, and others than the head guessed them."""
    names = {"eagle": False, "block": True, "medusa": False, "mtp": True}
    arms: list[Drafter] = [OwnHead(HEADS[name], packed=packed) for name, packed in names.items()]
    seer = oracle(truth, 0.3)
    seer.name = "seer"
    return MixDrafter([*arms, seer])


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_head_never_changes_the_text(config: HeadConfig, world: World) -> None:
    """As torch defines it, and as it is served."""
    assert generate(OwnHead(config), world, temperature=1.0) == truth_for("sampled")
    assert generate(OwnHead(config, packed=True), world) == truth_for("greedy")


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_several_heads_never_change_the_text(sampling: str, world: World) -> None:
    truth = truth_for(sampling)
    assert generate(heads_and_a_seer(truth), world, **SAMPLING[sampling]) == truth


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
def test_heads_obey_over_every_kind_of_decoder(family: ModelConfig, packed: bool) -> None:
    truth = generate(MixDrafter([]), World(config=family), temperature=1.0)
    for config in HEADS.values():
        assert generate(OwnHead(config, packed=packed), World(config=family), temperature=1.0) == truth


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_drawn_under_other_rules_is_judged(rule: str) -> None:
    """Those rules draw other texts than plain decoding does, by the same law; they need what a draft says of itself."""
    engine = World().engine(OwnHead(HEADS["eagle"], packed=True))
    choice = SpeculationChoice(rule=rule)
    tracks = [add(engine, str(i), prompt, choice, temperature=1.0)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert engine.stats.speculation.drafted > 50 and all(track.seq.finish_reason for track in tracks)


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
        tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt, temperature=1.0)]
        for _ in range(moment):
            engine.step()
        engine.abort("1")
        run(engine)
        assert engine.runner.pool.num_held == 0
        assert [tracks[i].seq.tokens[len(PROMPTS[i]) :] for i in (0, 2, 3, 4)] == [truth[i] for i in (0, 2, 3, 4)]
        assert not drafter.inner._pending, "nothing is kept of who has left"  # type: ignore[attr-defined]


class Scratch:
    """A head that reads a whole text at once, from its tokens alone."""

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
        mine.cached = share.num_new_tokens
        self.drafter.update_kv([StepResult(share, hidden_states=output.hidden_states)])
        return mine

    def guess(self, seq: Sequence, budget: Budget) -> tuple[Draft, list[torch.Tensor]]:
        mine = self.read(seq)
        (draft,) = self.drafter.propose([mine], [budget])
        kept = remembered(self.drafter, mine)
        self.drafter.forget(mine)
        self.runner.trim(mine, 0)
        return draft, kept


def remembered(drafter: HeadDrafter, seq: Sequence) -> list[torch.Tensor]:
    """What lies in the pages of the places that were run, of all the head's layers."""
    pages = drafter.pages
    slots = pages.slots(seq, 1, len(seq.tokens) - 1)
    found = [t.flatten(0, 1)[slots].clone() for t in (*pages.keys, *pages.values)]
    return found if pages.state_cache is None else [*found, pages.state_cache.flatten(0, 1)[slots].clone()]


class Compared(OwnHead):
    """Takes turns with another drafter, and compares the head's guesses and memory with those of a fresh one."""

    def __init__(self, config: HeadConfig, page_size: int, other: Drafter, packed: bool = False) -> None:
        super().__init__(config, packed=packed)
        self.scratch, self.other = Scratch(config, page_size, packed), other
        self.turn = self.compared = 0

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        self.turn += 1
        if self.turn % 3 == 0:  # the texts move on by more than this head guesses right
            return self.other.propose(seqs, budgets)
        drafts = self.inner.propose(seqs, budgets)
        assert isinstance(self.inner, HeadDrafter)
        for seq, budget, draft in zip(seqs, budgets, drafts, strict=True):
            if budget.nodes:
                fresh, kept = self.scratch.guess(seq, budget)
                assert len(draft) > 0 and draft.tokens == fresh.tokens
                for mine, theirs in zip(remembered(self.inner, seq), kept, strict=True):
                    assert torch.allclose(mine, theirs, atol=1e-5)
                self.compared += 1
        return drafts


PREEMPTIONS: dict[str, Callable[[Engine], None]] = {"": lambda engine: None, "preempted": preempt_youngest}


@pytest.mark.parametrize("world", ["page 4", "page 16, short steps", "page 1"])
@pytest.mark.parametrize("disturb", PREEMPTIONS.values(), ids=PREEMPTIONS)
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_guess_and_what_it_is_made_of_depend_on_the_tokens_alone(
    config: HeadConfig, disturb: Callable[[Engine], None], world: str
) -> None:
    truth = truth_for("sampled")
    compared = Compared(config, WORLDS[world].page_size, tree_around(truth))
    assert generate(compared, WORLDS[world], disturb, temperature=1.0) == truth
    assert compared.compared > 20


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_the_same_holds_for_heads_as_they_are_served(config: HeadConfig) -> None:
    truth = truth_for("sampled")
    for disturb in PREEMPTIONS.values():
        compared = Compared(config, 4, tree_around(truth), packed=True)
        assert generate(compared, World(), disturb, temperature=1.0) == truth
        assert compared.compared > 20
    greedy = Compared(config, 16, tree_around(truth_for("greedy")), packed=True)
    assert generate(greedy, WORLDS["page 16, short steps"], preempt_youngest) == truth_for("greedy")


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_prefix_that_is_found_was_read_already(config: HeadConfig) -> None:
    """Also where it was written by a text that nobody guessed for."""
    prompts = [[*range(1, 18), i] for i in range(1, 4)]
    cold = generate(MixDrafter([]), World(prefix_cache=False), prompts=prompts, temperature=1.0)
    compared = Compared(config, 4, oracle([[]] * 5, 1.0))
    engine = World().engine(compared)
    off = add(engine, "7", prompts[0], temperature=1.0)[0]
    off.seq.request = type(off.seq.request)(**{**vars(off.seq.request), "drafters": ()})
    run(engine)
    assert compared.compared == 0
    tracks = [track for i, prompt in enumerate(prompts) for track in add(engine, str(i), prompt, temperature=1.0)]
    run(engine)
    assert [track.seq.tokens[18:] for track in tracks] == cold
    assert all(track.cached_prompt_tokens == 16 for track in tracks)
    assert compared.compared > 10


def test_what_is_drawn_says_from_what() -> None:
    engine = World().engine(drafter := OwnHead(HEADS["eagle"]))
    judged = SpeculationChoice(rule="rejection")
    tracks = [add(engine, str(i), PROMPTS[i], judged, temperature=t)[0] for i, t in ((0, 0.0), (1, 1.0))]
    while any(track.seq.pending > 1 or not track.seq.num_output_tokens for track in tracks):
        engine.step()
    seqs = [track.seq for track in tracks]
    for seq in seqs:
        assert engine.runner.reserve(seq, len(seq.tokens) + 4)
    greedy, drawn = drafter.propose(seqs, [Budget(4)] * 2)
    assert not any(greedy.sampled or ()) and drawn.sampled == (True,) * 4
    assert drawn.probs is not None and torch.allclose(drawn.probs.sum(-1), torch.ones(4))
    assert isinstance(drafter.inner, HeadDrafter)
    known = set(drafter.inner.head.draft_ids.tolist())
    assert set(drawn.probs.sum(0).nonzero()[:, 0].tolist()) <= known, "it says nothing of tokens it does not know"
    assert all(drawn.probs[i, token] > 0 for i, token in enumerate(drawn.tokens))
    alone = drafter.propose(seqs[:1], [Budget(4)])[0]
    assert alone.tokens == greedy.tokens and alone.probs is None, "nothing was drawn, so nothing is said"
    assert alone.confidence == pytest.approx(greedy.confidence, rel=1e-4)


@pytest.mark.parametrize("config", [HEADS["eagle"], HEADS["block"]], ids=str)
def test_a_chain_ends_where_it_is_unlikely_to_stand(config: HeadConfig) -> None:
    engine = World().engine(drafter := OwnHead(config))
    (track,) = add(engine, "0", PROMPTS[1])
    while track.seq.pending > 1 or not track.seq.num_output_tokens:
        engine.step()
    assert engine.runner.reserve(track.seq, len(track.seq.tokens) + 4)
    whole = drafter.propose([track.seq], [Budget(4)])[0]
    assert whole.confidence is not None and len(whole) == 4
    floor = whole.confidence[0] * whole.confidence[1] * 1.01
    assert drafter.propose([track.seq], [Budget(4, min_probability=floor)])[0].tokens == whole.tokens[:2], (
        "the last one is kept"
    )
