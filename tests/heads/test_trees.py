"""Trees of heads: lossless, and each node depends on its own branch alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.tree import MAX_WIDTH
from foretell.engine.engine import Engine
from foretell.engine.rule_verifier import RuleVerifier, VerifyCase, rule_for
from foretell.kernels.native.library import library
from foretell.models.draft_heads import HeadConfig
from foretell.types import Budget, Draft, Sequence, SpeculationChoice, VerifyResult
from tests.heads.test_head_losslessness import Compared
from tests.laws.test_losslessness import SAMPLING, WORLDS, preempt_youngest, truth_for
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, generate, run, tree_around

TREES = {name: replace(world, budget=14, levels=3) for name, world in WORLDS.items()}
STEPPING = [name for name, config in HEADS.items() if config.kind not in ("block", "medusa")]
heads = pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)


@pytest.mark.parametrize("world", TREES.values(), ids=TREES)
@heads
def test_a_tree_is_lossless(config: HeadConfig, world: World) -> None:
    assert generate(OwnHead(config), world, preempt_youngest, temperature=1.0) == truth_for("sampled")
    assert generate(OwnHead(config, packed=True), world) == truth_for("greedy")


@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_tree_is_lossless_under_all_sampling_settings(sampling: str) -> None:
    for packed in (False, True):
        drafter = OwnHead(HEADS["eagle"], packed=packed)
        assert generate(drafter, TREES["page 4"], **SAMPLING[sampling]) == truth_for(sampling)


def waiting(
    config: HeadConfig, world: World, packed: bool = False, **params: object
) -> tuple[HeadDrafter, list[Sequence]]:
    """Return decoding sequences of several lengths."""
    engine = world.engine(drafter := OwnHead(config, packed=packed))
    choice = SpeculationChoice(rule=params.pop("rule", None))  # type: ignore[arg-type]
    states = [add(engine, str(i), prompt, choice, **params)[0] for i, prompt in enumerate(PROMPTS)]
    for _ in range(4):
        engine.step()
    seqs = [state.seq for state in states if state.seq.finish_reason is None]
    for seq in seqs:
        assert seq.pending == 1 and engine.runner.reserve(seq, len(seq.tokens) + 40)
    assert isinstance(drafter.inner, HeadDrafter) and len(seqs) > 2
    return drafter.inner, seqs


def follow(draft: Draft, tokens: tuple[int, ...]) -> int:
    """Return the node at the end of a branch."""
    node = -1
    for token in tokens:
        (node,) = [child for child in draft.children(node) if draft.tokens[child] == token]
    return node


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@heads
def test_the_first_branch_equals_the_chain(config: HeadConfig, page_size: int, packed: bool) -> None:
    """And a tree is batch invariant."""
    drafter, seqs = waiting(config, World(page_size=page_size, pages=600), packed)
    chains = drafter.propose(seqs, [Budget(3)] * len(seqs))
    trees = drafter.propose(seqs, [Budget(30, max_depth=3)] * len(seqs))
    for seq, chain, tree in zip(seqs, chains, trees, strict=True):
        assert len(tree) > 3 and max(tree.depths()) <= 3
        assert len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree), "one row per token under one parent"
        assert follow(tree, chain.tokens[:2]) >= 0
        (alone,) = drafter.propose([seq], [Budget(30, max_depth=3)])
        assert (alone.tokens, alone.parents) == (tree.tokens, tree.parents)
        assert alone.confidence == pytest.approx(tree.confidence, rel=1e-4)
        if config.kind != "medusa":  # whose shape is not made of how confidence it is
            shallow, wide = drafter.propose([seq, seq], [Budget(10, max_depth=1), Budget(30, max_depth=2)])
            assert shallow.parents == (-1,) * min(10, MAX_WIDTH) and max(wide.depths()) == 2


@pytest.mark.parametrize("name", STEPPING)
@pytest.mark.parametrize("packed", [False, True])
def test_a_node_depends_on_its_branch_alone(name: str, packed: bool) -> None:
    """The children of a node are those of a chain along its branch: siblings do not attend to each other."""
    if packed and library() is None:
        pytest.skip("no native library here")
    drafter, seqs = waiting(HEADS[name], World(), packed)
    for seq in seqs[:3]:
        (tree,) = drafter.propose([seq], [Budget(36, max_depth=4)])
        assert tree.confidence is not None
        parents = [node for node in range(len(tree)) if tree.children(node)]
        assert any(tree.children(tree.parents[node]).index(node) > 0 for node in parents), "a second choice is expanded"
        for node in parents:
            known = along(drafter, seq, branch(tree, node))
            for child in tree.children(node):
                assert tree.confidence[child] == pytest.approx(known[tree.tokens[child]], rel=5e-2 if packed else 1e-4)


def branch(tree: Draft, node: int) -> list[int]:
    found: list[int] = []
    while node >= 0:
        found.append(tree.tokens[node])
        node = tree.parents[node]
    return found[::-1]


def along(drafter: HeadDrafter, seq: Sequence, tokens: list[int]) -> dict[int, float]:
    """Return the head's probabilities after a branch, step by step by the reference implementation."""
    from foretell.draft.heads.assistant import AssistantDrafter
    from foretell.draft.heads.eagle import EagleDrafter
    from foretell.runner.heads.kv import DraftAttention

    if isinstance(drafter, AssistantDrafter):
        with torch.inference_mode():
            steps = drafter._steps([seq])
            *_, logits = [steps.chain_step([token]) for token in (seq.tokens[-1], *tokens)]
        return dict(enumerate(logits[0].softmax(-1).tolist()))
    assert isinstance(drafter, EagleDrafter)
    head, text = drafter.head, len(seq.tokens)
    with torch.inference_mode():
        memory, feature = drafter.pages.gather([seq.pages], text + len(tokens)), drafter.last_features([seq])
        for at, token in enumerate([seq.tokens[-1], *tokens]):
            look = DraftAttention(
                memory, head.config.layer, [text - 1 + at], torch.ones(1, 1, dtype=torch.bool), first_position=1
            )
            states = head.step(torch.tensor([token]), feature, head.rope_rows(torch.tensor([text - 1 + at])), look)
            feature = head.carry(states)
        shares = head.logits(states)[0].softmax(-1)
    return dict(zip(head.draft_ids.tolist(), shares.tolist(), strict=True))


@pytest.mark.parametrize("rule", ["rejection", "block"])
@heads
def test_siblings_are_sampled_where_the_rule_needs_probabilities(config: HeadConfig, rule: str) -> None:
    drafter, seqs = waiting(config, World(), rule=rule, temperature=1.0)
    for tree in drafter.propose(seqs, [Budget(16, max_depth=3)] * len(seqs)):
        assert tree.sampled == (True,) * len(tree) and tree.probs is not None and len(tree) > 3
        assert len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree)
        assert torch.allclose(tree.probs.sum(-1), torch.ones(len(tree)))
        for node in range(len(tree)):
            elder = [child for child in tree.children(tree.parents[node]) if child < node]
            assert tree.probs[node, tree.tokens[node]] > 0
            assert not tree.probs[node, [tree.tokens[child] for child in elder]].any(), "without replacement"


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "typical"])
def test_every_rule_verifies_trees(rule: str) -> None:
    for name in ("eagle", "block", "medusa"):
        engine = TREES["page 4"].engine(OwnHead(HEADS[name], packed=True))
        choice = SpeculationChoice(rule=rule)
        states = [add(engine, str(i), prompt, choice, temperature=0.6)[0] for i, prompt in enumerate(PROMPTS)]
        run(engine)
        assert sum(state.speculation.drafted for state in states) > 100 and all(
            state.seq.finish_reason for state in states
        )
        assert sum(state.speculation.accepted for state in states) > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chains_and_trees_in_one_batch_are_verified_as_if_alone(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[Draft] = []
    verify_one = RuleVerifier._verify_one

    def counted(self: RuleVerifier, case: VerifyCase, probs: Tensor) -> VerifyResult:
        alone.append(case.draft)
        return verify_one(self, case, probs)

    monkeypatch.setattr(RuleVerifier, "_verify_one", counted)
    found = []
    for rule_verifier in (RuleVerifier(), RuleVerifier(lambda request: rule_for(request))):
        engine = TREES["page 4"].engine(OwnHead(HEADS["eagle"], packed=True))
        engine.verifier.rule_verifier = rule_verifier
        choices = [SpeculationChoice(rule=rule, max_draft=2 if i % 2 else None) for i in range(len(PROMPTS))]
        states = [add(engine, str(i), PROMPTS[i], choice, temperature=0.8)[0] for i, choice in enumerate(choices)]
        run(engine)
        found.append([state.seq.tokens for state in states])
        if len(found) == 1:
            assert len(alone) > 10 and not any(draft.is_chain for draft in alone)
    assert found[0] == found[1] and any(draft.is_chain and len(draft) for draft in alone)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("page_size", [3, 7])
@heads
def test_sampled_trees_survive_preemption_and_aborts(config: HeadConfig, page_size: int, rule: str) -> None:
    """No page and no token is lost; `test_sampled_trees.py` checks the distribution."""
    engine = replace(TREES["page 4"], page_size=page_size, pages=90 // page_size).engine(drafter := OwnHead(config))
    choice, rng = SpeculationChoice(rule=rule), random.Random(page_size)
    states = [add(engine, str(i), prompt, choice, temperature=0.8)[0] for i, prompt in enumerate(PROMPTS)]

    def disturb(engine: Engine) -> None:
        for seq in list(engine.scheduler.running):
            if rng.random() < 0.2:
                engine.scheduler.preempt(seq)
        if engine.stats.forwards == 5:
            engine.abort("1")

    run(engine, disturb)
    assert engine.runner.pool.num_held == 0 and not drafter.inner._pending  # type: ignore[attr-defined]
    assert [state.seq.finish_reason == "abort" for state in states] == [False, True, False, False, False]
    assert engine.stats.speculation.drafted > 50


@pytest.mark.parametrize("page_size", [2, 3, 7, 64])
@pytest.mark.parametrize("name", ["eagle", "medusa", "block"])
def test_trees_work_with_any_page_size(name: str, page_size: int) -> None:
    world = replace(TREES["page 4"], page_size=page_size, pages=600 // page_size)
    assert generate(OwnHead(HEADS[name], packed=True), world, preempt_youngest) == truth_for("greedy")
    truth = truth_for("sampled")
    assert generate(tree_around(truth), world, preempt_youngest, temperature=1.0) == truth


@pytest.mark.parametrize("world", ["page 4", "page 16, short steps", "page 1"])
@pytest.mark.parametrize("name", ["eagle", "eagle of two layers", "eagle with a window", "block", "distilled"])
def test_trees_hold_no_pages(name: str, world: str) -> None:
    truth = truth_for("sampled")
    compared = Compared(HEADS[name], WORLDS[world].page_size, tree_around(truth))
    assert generate(compared, TREES[world], preempt_youngest, temperature=1.0) == truth
    assert compared.compared > 12


@heads
def test_aborts_hold_no_pages(config: HeadConfig) -> None:
    truth = truth_for("sampled")
    for moment in range(4):
        drafter = OwnHead(config)
        engine: Engine = TREES["page 4"].engine(drafter)
        states = [state for i, prompt in enumerate(PROMPTS) for state in add(engine, str(i), prompt, temperature=1.0)]
        for _ in range(moment):
            engine.step()
        engine.abort("1")
        run(engine)
        assert engine.runner.pool.num_held == 0 and not drafter.inner._pending  # type: ignore[attr-defined]
        assert [states[i].seq.tokens[len(PROMPTS[i]) :] for i in (0, 2, 3, 4)] == [truth[i] for i in (0, 2, 3, 4)]


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_penalties_and_logprobs_follow_the_accepted_branch(name: str) -> None:
    """Penalties see the draft tokens on the path to a row, and no siblings."""
    params = {"temperature": 0.7, "frequency_penalty": 1.5, "repetition_penalty": 1.3, "logprobs": 3}
    found = []
    for drafter, world in ((None, World()), (OwnHead(HEADS[name], packed=True), TREES["page 4"])):
        engine = world.engine(drafter)
        states = [add(engine, str(i), prompt, **params)[0] for i, prompt in enumerate(PROMPTS)]
        run(engine)
        assert all(len(state.logprobs) == state.seq.num_output_tokens for state in states)
        found.append(([state.seq.tokens for state in states], [each for state in states for each in state.logprobs]))
    (plain, confidence), (text, found_logprobs) = found
    assert text == plain and [each.rank for each in found_logprobs] == [each.rank for each in confidence]
    assert [each.logprob for each in found_logprobs] == pytest.approx([each.logprob for each in confidence], abs=1e-4)
