"""Drafts that a head makes in one piece are those of its definition, step by step; on a CPU the same work is not
recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.draft.base import Drafter
from foretell.draft.heads.base import HeadDrafter
from foretell.draft.heads.graph_draft import build_dynamic_tree
from foretell.draft.heads.tree import EagleTree
from foretell.models.draft_heads import HeadConfig
from foretell.runner.cuda.graphs import GraphCache, capture_now
from foretell.runner.heads import tables as head_tables
from foretell.runner.heads.sampler import TreeCandidates, TreeTopK
from foretell.runner.heads.tables import DraftRow, DraftShape, DraftTable
from foretell.runner.native.head_prefill import PrefillRange
from foretell.types import Budget, Draft, Sequence, SpeculationChoice
from tests.heads.test_head_losslessness import Compared
from tests.laws.test_losslessness import SAMPLING, preempt_youngest, truth_for
from tests.laws.test_losslessness import WORLDS as LAWS
from tests.recordings import Tape
from tests.tiny import CONTEXT, HEADS, PROMPTS, OwnHead, World, add, generate, run, tree_around

LONG = [*PROMPTS, [1 + i % 30 for i in range(45)]]


def waiting(
    config: HeadConfig, rule: str = "match", heats: tuple[float, ...] = (0.0,)
) -> tuple[list[HeadDrafter], list[list[Sequence]]]:
    """Twice the same texts, of several lengths, that could be guessed for now: by definition, and in one piece."""
    drafters, texts = [], []
    for whole in (False, True):
        engine = WORLD.engine(drafter := OwnHead(config, single_graph=whole))
        choice, warm = SpeculationChoice(rule=rule), itertools.cycle(heats)
        tracks = [
            add(engine, str(i), LONG[i], choice, temperature=next(warm), ignore_eos=True)[0] for i in range(len(LONG))
        ]
        for _ in range(5):
            engine.step()
        seqs = [track.seq for track in tracks if track.seq.finish_reason is None]
        for seq in seqs:
            assert seq.pending == 1 and seq.num_output_tokens and engine.runner.reserve(seq, len(seq.tokens) + 40)
        assert isinstance(drafter.inner, HeadDrafter) and drafter.inner.traits.single_graph == whole and len(seqs) > 2
        drafters.append(drafter.inner)
        texts.append(seqs)
    assert [seq.tokens for seq in texts[0]] == [seq.tokens for seq in texts[1]]
    return drafters, texts


def compare(mine: list[Draft], defined: list[Draft]) -> None:
    for draft, truth in zip(mine, defined, strict=True):
        assert len(draft) and (draft.tokens, draft.parents, draft.sampled) == (
            truth.tokens,
            truth.parents,
            truth.sampled,
        )
        assert draft.confidence == pytest.approx(truth.confidence, rel=1e-3)
        assert (draft.probs is None) == (truth.probs is None)
        if draft.probs is not None and truth.probs is not None:
            assert torch.allclose(draft.probs, truth.probs, atol=1e-4)


def both(drafters: list[HeadDrafter], texts: list[list[Sequence]], budgets: list[Budget], some: slice) -> None:
    defined, mine = (each.propose(seqs[some], budgets[some]) for each, seqs in zip(drafters, texts, strict=True))
    compare(mine, defined)


WORLD = World(page_size=7, pages=170, budget=2)
SOME = [slice(0, 1), slice(0, None)]


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_chain_is_that_of_the_definition(config: HeadConfig) -> None:
    drafters, texts = waiting(config)
    for some in SOME:
        both(drafters, texts, [Budget(5)] * len(LONG), some)
        both(drafters, texts, [Budget(1 + i % 4, min_probability=0.003 * i) for i in range(len(LONG))], some)


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_tree_is_that_of_the_definition(config: HeadConfig) -> None:
    drafters, texts = waiting(config)
    shapes = [(6, 3), (30, 3), (24, 6), (3, 2), (40, 2), (12, 5)]
    for some in SOME:
        for shape in shapes[:3]:
            both(drafters, texts, [Budget(shape[0], max_depth=shape[1])] * len(LONG), some)
        mixed = [Budget(nodes, max_depth=levels, min_probability=0.001 * i) for i, (nodes, levels) in enumerate(shapes)]
        both(drafters, texts, mixed, some)
        both(drafters, texts, [Budget(5) if i % 2 else each for i, each in enumerate(mixed)], some)


@pytest.mark.parametrize("name", ["eagle", "eagle of two layers", "distilled"])
def test_a_tree_of_equals_is_that_of_the_definition(name: str) -> None:
    """Which tokens stand for equals is left open; which branches go on is not."""
    drafters, texts = waiting(HEADS[name])
    for drafter in drafters:
        same = torch.tensor([3.0, 3.0] + [0.0] * (drafter.head.config.outputs - 2))
        drafter.head.logits = lambda states, same=same: same.expand(len(states), -1)  # type: ignore[misc]
    for nodes, levels in ((9, 4), (20, 6), (30, 3), (12, 7)):
        budgets = [Budget(nodes - i % 3, max_depth=levels) for i in range(len(LONG))]
        defined, mine = (each.propose(seqs, budgets) for each, seqs in zip(drafters, texts, strict=True))
        assert [draft.parents for draft in mine] == [draft.parents for draft in defined]
        assert any(parent > 0 for draft in mine for parent in draft.parents)


def test_what_a_text_does_not_follow_crowds_nothing_out() -> None:
    """Eight branches that it leaves out go on with likelier children than the two that it follows."""
    table = DraftTable(DraftShape(1, 256, 3, width=10), 21, 4, torch.device("cpu"))
    table.upload([DraftRow(0, 5, 0, [0], width=2)])
    choice, tree = TreeTopK(table, torch.arange(30), 10), EagleTree(Budget(99, max_depth=3), width=2)
    likely, even, two = (torch.full((30,), 1e-6) for _ in range(3))
    likely[:2], likely[2:10], even[:], two[20:22] = 0.18, 0.08, 1 / 30, 0.5
    choice.add_level(likely.log()[None])
    for _ in range(2):
        tokens, _ = choice.expand()
        choice.add_level(torch.where(tokens[:, None] < 2, even, two).log())
    build_dynamic_tree(tree, TreeCandidates.from_readback(choice.output), 0)
    assert tree.depth == 3 and len(tree.tokens) == 10 + 2 * 10 + 2 * 10


def test_a_level_stands_in_the_order_in_which_it_was_found() -> None:
    """As on the host, where the first of equals is the first that was found, not the one with the likelier parent."""
    table = DraftTable(DraftShape(1, 256, 2, width=2), 3, 4, torch.device("cpu"))
    table.upload([DraftRow(0, 5, 0, [0], width=2)])
    choice = TreeTopK(table, torch.arange(30), 3)
    choice.tokens, choice.child_probs = (
        torch.tensor([[7, 8, 9]]),
        torch.tensor([[0.25, 0.125, 0.5]], dtype=torch.float64),
    )
    tokens, parents = choice.expand()
    assert (tokens.tolist(), parents.tolist(), choice.path_probs.tolist()) == ([7, 9], [[0, 0]], [[0.25, 0.5]])


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_what_is_drawn_is_too(config: HeadConfig, rule: str) -> None:
    """Each with its own noise, and some of the texts greedy."""
    for heats in ((0.8,), (0.0, 1.3, 0.7)):
        drafters, texts = waiting(config, rule, heats)
        for some in SOME:
            both(drafters, texts, [Budget(4, min_probability=0.002 * i) for i in range(len(LONG))], some)
            both(drafters, texts, [Budget(8 + 4 * i, max_depth=3) for i in range(len(LONG))], some)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_text_may_end_before_others_have_their_guesses(config: HeadConfig, whole: bool) -> None:
    engine = World(pages=400).engine(drafter := OwnHead(config, single_graph=whole))
    prompts = ([1 + j % 30 for j in range(CONTEXT - 5)], PROMPTS[1])
    seqs = [
        add(engine, str(i), prompt, max_tokens=5 + 40 * i, ignore_eos=True)[0].seq for i, prompt in enumerate(prompts)
    ]
    while any(seq.pending > 1 or not seq.num_output_tokens for seq in seqs):
        assert engine.busy
        engine.step()
    left = CONTEXT - len(seqs[0].tokens)
    for seq in seqs:
        engine.runner.reserve(seq, len(seq.tokens) + left + 10)
    for branches in (0, 12):
        depths = (left, left + 5)
        budgets = [Budget(depth + branches, max_depth=depth) for depth in depths]
        together = drafter.propose(seqs, budgets)
        alone = [drafter.propose([seq], [budget])[0] for seq, budget in zip(seqs, budgets, strict=True)]
        assert len(together[0]) and [each.tokens for each in together] == [each.tokens for each in alone]


class Whole(Compared):
    """Guesses and reads in one piece, and is compared with a fresh head that does so by definition."""

    def __init__(self, config: HeadConfig, page_size: int, other: Drafter) -> None:
        super().__init__(config, page_size, other)
        self.settings = {"single_graph": True}


@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_guesses_and_memory_are_those_of_the_definition_all_along(config: HeadConfig, levels: int) -> None:
    """With prefixes that were found, texts that come back, and such as move on by what others guessed."""
    if levels and config.kind == "medusa":
        pytest.skip("the shape of its trees hangs on how its guesses stood before")
    for name, heat in (("page 16, short steps", 0.0), ("few pages", 1.0)):
        truth = truth_for("sampled" if heat else "greedy")
        world = replace(LAWS[name], levels=levels, budget=10 if levels else 6)
        compared = Whole(config, world.page_size, tree_around(truth))
        assert generate(compared, world, preempt_youngest, temperature=heat) == truth
        assert compared.compared > 10


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_text_is_the_same_however_it_is_sampled(sampling: str) -> None:
    for name, levels in (("eagle", 0), ("eagle", 3), ("block", 3)):
        drafter = OwnHead(HEADS[name], single_graph=True)
        assert generate(drafter, World(levels=levels, budget=9), **SAMPLING[sampling]) == truth_for(sampling)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_drawn_for_other_rules_can_be_judged(rule: str) -> None:
    engine = World().engine(OwnHead(HEADS["eagle"], single_graph=True))
    choice = SpeculationChoice(rule=rule)
    tracks = [add(engine, str(i), prompt, choice, temperature=1.0)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert engine.stats.speculation.drafted > 50 and all(track.seq.finish_reason for track in tracks)


class Unlookable(TorchDispatchMode):
    """Refuses what a graph cannot hold: a look at values, shapes that hang on them, numbers that come from the host."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "bincount", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = [each for each in args[1] if each is not None] if name in ("index", "index_put", "index_put_") else []
        if name.startswith(self.refused) or any(mask.dtype == torch.bool for mask in masks):
            raise AssertionError(f"{name} is no work for a graph")
        return func(*args, **(kwargs or {}))


class Watched(GraphCache[Any, Any]):
    """Runs all work as it would be recorded."""

    def __call__(self, sizes: Any, run: Callable[[], Any], keep: bool = True) -> Any:
        self.graphs[sizes] = None
        with Unlookable():
            return run()


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_the_work_never_looks_at_its_values(config: HeadConfig, heat: float) -> None:
    engine = World(budget=9, levels=3).engine(drafter := OwnHead(config, single_graph=True))
    inner: Any = drafter.inner
    inner._graph.graphs, inner._graph_prefill.graphs = (Watched(torch.device("cpu")) for _ in range(2))
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt, SpeculationChoice(max_draft=3) if i % 2 else SpeculationChoice(), temperature=heat)
    run(engine)
    assert len(inner._graph.graphs.graphs) > 3 and len(inner._graph_prefill.graphs.graphs) > 2
    with pytest.raises(AssertionError, match="no work for a graph"), Unlookable():
        torch.ones(3).tolist(), torch.ones(1).item()


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_what_lies_in_the_tables_from_before_does_not_matter(config: HeadConfig) -> None:
    """The same memory serves other texts, more and fewer of them, with longer and shorter ones in their rows."""
    drafters, texts = waiting(config)
    whole: Any = drafters[1]
    whole._graph.tables.clear()
    for budgets in ([Budget(4)] * len(LONG), [Budget(14, max_depth=3)] * len(LONG)):
        for order in ((0, 1, 2, 5), (5, 4, 3), (2, 5, 0, 1), (3, 3, 3)):
            defined, mine = (
                each.propose([seqs[i] for i in order], [budgets[i] for i in order])
                for each, seqs in zip(drafters, texts, strict=True)
            )
            compare(mine, defined)
    assert len(whole._graph.tables) == 2, "one for chains and one for trees"


@pytest.mark.parametrize("places", [[5] * 9, [3, 2000, 7, 60, 60, 5], [300, 5, 5, 5, 5, 5, 5, 5], [5000], [1]])
def test_texts_are_cut_into_passes_of_bounded_work(places: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_tables, "MAX_POSITIONS", 2048)
    texts = [DraftRow(1, place, place - 1, []) for place in places]
    cut = head_tables.split_batch(texts)
    assert [text for some in cut for text in texts[some]] == texts
    sizes = [head_tables.draft_shape(texts[some], 1) for some in cut]
    assert all(each.is_small or len(texts[some]) == 1 for each, some in zip(sizes, cut, strict=True))
    merged = [slice(a.start, b.stop) for a, b in zip(cut, cut[1:], strict=False)]
    assert all(len(texts[some]) > 1 for some in merged), "no pass is empty"


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_several_passes_guess_what_the_definition_does(config: HeadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters, texts = waiting(config, heats=(0.0, 1.0))
    monkeypatch.setattr(head_tables, "MAX_POSITIONS", 1024)  # two texts at once
    whole: Any = drafters[1]
    whole._graph.tables.clear()
    for budgets in ([Budget(4)] * len(LONG), [Budget(14, max_depth=3)] * len(LONG)):
        both(drafters, texts, budgets, slice(0, None))
    assert max(sizes.sequences for sizes in whole._graph.tables) == 2


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_what_serves_for_a_draft_guesses_the_same(config: HeadConfig, heat: float) -> None:
    """Deeper, wider, for more texts and longer ones."""
    drafters, texts = waiting(config, heats=(heat,))
    whole: Any = drafters[1]
    deepest = min(6, whole.max_depth)
    whole._graph.graphs = (tape := Tape()).recorder()
    with capture_now():
        for budget in (Budget(deepest), Budget(40, max_depth=deepest)):
            whole.propose(texts[1], [budget] * len(texts[1]))
    recorded = tape.count
    for some in SOME:
        both(drafters, texts, [Budget(max(1, deepest - 2))] * len(LONG), some)
        both(
            drafters,
            texts,
            [Budget(8 + i, max_depth=max(2, deepest - 2), min_probability=0.001 * i) for i in range(6)],
            some,
        )
    assert tape.count == recorded and sum(whole._graph.graphs.pool.requests.values()) >= 2


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
@torch.inference_mode()
def test_what_serves_for_a_reading_keeps_the_same(config: HeadConfig) -> None:
    """The same places are read by themselves, and in rows and columns for more."""
    drafters, texts = waiting(config)
    head, seq = drafters[1], texts[1][-1]
    reader, pages = head._graph_prefill, head.pages
    assert reader is not None
    keys, values, features = pages.caches
    kept = [*keys, *values, *([] if features is None else [features])]
    states = torch.randn(30, config.input_width, generator=torch.Generator().manual_seed(0))
    found: list[list[torch.Tensor]] = []
    for serves in (False, True):
        reader.graphs = (tape := Tape()).recorder()
        if serves:
            with capture_now():
                reader.prefill([PrefillRange(seq, 1, 31, [states])], None)
        for each in kept:
            each.zero_()
        assert reader.prefill([PrefillRange(seq, 5, 8, [states[:3]])], None)
        assert tape.count == serves
        found.append([each.clone() for each in kept])
    for alone, filled in zip(*found, strict=True):
        torch.testing.assert_close(filled, alone, rtol=1e-4, atol=1e-4)
        assert alone.any()
