"""The law of reserved pages: a drafter touches no page but those that the scheduler reserved for its sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.draft.draft_builder import ChainBuilder
from foretell.draft.heads.base import check_reserved
from foretell.draft.heads.block import BlockDrafter
from foretell.draft.registry import HEADS as REGISTERED
from foretell.engine.engine import Engine
from foretell.types import Budget, Sequence, SpeculationChoice
from tests.tiny import HEADS, OwnHead, OwnVariant, World, add, early_exit, quantized_self, run

SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "match": {"temperature": 1.0},
    "rejection": {"temperature": 1.0, "speculation": SpeculationChoice(rule="rejection")},
}
BUDGETS = [
    Budget(nodes, max_depth=levels)
    for nodes, levels in ((1, 0), (2, 1), (3, 0), (3, 2), (5, 2), (7, 4), (9, 3), (8, 0))
]
ALL_BUDGETS = [Budget(nodes, max_depth=levels) for nodes in range(1, 9) for levels in range(nodes)]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 4, 5, 6, 7, 4, 5]]
WAYS = {"torch": {}, "native": {"packed": True}, "single graph": {"single_graph": True}}


@dataclass
class EveryBudget:
    """Asks for drafts of every budget after every step, and checks which pages change."""

    budgets: list[Budget]
    asked: set[tuple[int, int]] = field(default_factory=set)  # position in the page, index of the budget

    def __call__(self, engine: Engine) -> None:
        for shift in range(len(self.budgets)):
            running = engine.scheduler.running
            if not all(seq.is_decoding for seq in running):
                return
            budgets = []
            for at, seq in enumerate(running):
                number = (shift + 3 * at) % len(self.budgets)  # sequences of one batch differ in their budgets
                budgets.append(replace(self.budgets[number], drafter=seq.request.drafters[0]))
                self.asked.add((len(seq.tokens) % engine.runner.pool.page_size, number))
            self._draft(engine, budgets)

    def _draft(self, engine: Engine, budgets: list[Budget]) -> None:
        scheduled = engine.scheduler.schedule(budgets)
        own = {page for each in scheduled for page in each.seq.pages[each.seq.published :]}
        others = [page for page in range(engine.runner.pool.count) if page not in own]
        before = [tensor[others].clone() for tensor in engine.runner.cache.tensors]
        drafts = engine.safe_drafter.propose(scheduled, [each.budget for each in scheduled])
        assert engine.safe_drafter.failures == 0, "the drafter asked for more than the scheduler reserved"
        for was, tensor in zip(before, engine.runner.cache.tensors, strict=True):
            assert torch.equal(was, tensor[others]), "the drafter wrote to a page of another sequence"
        for each, draft in zip(scheduled, drafts, strict=True):
            assert len(draft) <= each.budget.nodes
            assert max(draft.depths(), default=0) <= each.budget.depth
            engine.scheduler.release_unused(each.seq)


def generated(
    drafter: Drafter, world: World, after_step: Callable[[Engine], None], sampling: str, max_tokens: int
) -> list[list[int]]:
    engine = world.engine(drafter)
    params = {"max_tokens": max_tokens, "ignore_eos": True, **SAMPLING[sampling]}
    states = [add(engine, str(i), prompt, **params)[0] for i, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]
    run(engine, after_step)
    assert engine.runner.pool.num_held == 0
    return [state.seq.tokens[len(state.seq.request.prompt) :] for state in states]


def check(make: Callable[[], Drafter], sampling: str, page_size: int, budgets: list[Budget]) -> None:
    for at_once in (1, 2):
        world = World(page_size=page_size, pages=64, max_num_seqs=at_once, budget=2)
        every = EveryBudget(budgets)
        tokens = 2 * page_size + 2
        plain = generated(make(), world, lambda engine: None, sampling, tokens)
        assert generated(make(), world, every, sampling, tokens) == plain
        assert len(every.asked) == page_size * len(budgets), "every budget at every position in a page"


def head(name: str, way: str) -> Callable[[], OwnHead]:
    return lambda: OwnHead(HEADS[name], **WAYS[way])  # type: ignore[arg-type]


def test_every_registered_head_is_here() -> None:
    assert {config.kind for config in HEADS.values()} == {*REGISTERED, "distilled"}


@pytest.mark.parametrize("name", HEADS)
def test_heads_stay_within_their_reservation(name: str) -> None:
    check(head(name, "native"), "greedy", 4, BUDGETS)


@pytest.mark.parametrize("way", ["torch", "single graph"])
@pytest.mark.parametrize("name", ["eagle", "block", "medusa", "mtp", "distilled"])
def test_other_implementations_stay_within_their_reservation(name: str, way: str) -> None:
    check(head(name, way), "greedy", 3, BUDGETS[::2])


@pytest.mark.parametrize("name", ["eagle", "block", "medusa", "mtp", "distilled"])
@pytest.mark.parametrize("sampling", ["match", "rejection"])
def test_heads_that_sample_stay_within_their_reservation(name: str, sampling: str) -> None:
    check(head(name, "native"), sampling, 3, BUDGETS[::2])


@pytest.mark.parametrize("make", [early_exit, lambda: quantized_self("int8")], ids=["exit", "self"])
def test_variants_of_the_target_stay_within_their_reservation(make: Callable[[], OwnVariant]) -> None:
    check(make, "greedy", 4, BUDGETS)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HEADS)
def test_heads_over_all_budgets_and_page_sizes(name: str, way: str, sampling: str) -> None:
    for page_size in (1, 5):
        check(head(name, way), sampling, page_size, ALL_BUDGETS)


def test_a_draft_deeper_than_its_reservation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law fails for a head that asks for its deepest draft whatever its budget is."""
    planted = BlockDrafter._forward_blocks

    def deepest(self: BlockDrafter, seqs: list[Sequence], chains: list[ChainBuilder], depth: int) -> object:
        return planted(self, seqs, self.new_chains([Budget(self.max_depth)] * len(seqs)), self.max_depth)

    monkeypatch.setattr(BlockDrafter, "_forward_blocks", deepest)
    with pytest.raises(AssertionError, match="more than the scheduler reserved"):
        check(head("block", "native"), "greedy", 4, BUDGETS)


def test_too_few_reserved_slots_are_an_error_also_without_assertions() -> None:
    seq = add(World().engine(), "0", PROMPTS[0])[0].seq
    seq.pages = [5, 6]
    check_reserved(seq, 8, 4)
    with pytest.raises(RuntimeError, match="needs 9 slots and 8 are reserved"):
        check_reserved(seq, 9, 4)
