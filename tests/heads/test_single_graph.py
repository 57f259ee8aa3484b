"""Single-graph drafts of heads equal the reference, step by step; on a CPU the same code runs without being
captured."""

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
from tests.fake_graphs import FakeCapture
from tests.heads.test_head_losslessness import Compared
from tests.laws.test_losslessness import SAMPLING, preempt_youngest, truth_for
from tests.laws.test_losslessness import WORLDS as LAWS
from tests.tiny import CONTEXT, HEADS, PROMPTS, WITH_CACHE, OwnHead, World, add, generate, run, tree_around

LONG = [*PROMPTS, [1 + i % 30 for i in range(45)]]


def waiting(
    config: HeadConfig, rule: str = "match", temperatures: tuple[float, ...] = (0.0,)
) -> tuple[list[HeadDrafter], list[list[Sequence]]]:
    """Return the same decoding sequences twice, with the reference drafter and with a single-graph one."""
    drafters, sequences = [], []
    for whole in (False, True):
        engine = WORLD.engine(drafter := OwnHead(config, single_graph=whole))
        choice, warm = SpeculationChoice(rule=rule), itertools.cycle(temperatures)
        states = [
            add(engine, str(i), LONG[i], choice, temperature=next(warm), ignore_eos=True)[0] for i in range(len(LONG))
        ]
        for _ in range(5):
            engine.step()
        seqs = [state.seq for state in states if state.seq.finish_reason is None]
        for seq in seqs:
            assert seq.pending == 1 and seq.num_output_tokens and engine.runner.reserve(seq, len(seq.tokens) + 40)
        assert isinstance(drafter.inner, HeadDrafter) and drafter.inner.traits.single_graph == whole and len(seqs) > 2
        drafters.append(drafter.inner)
        sequences.append(seqs)
    assert [seq.tokens for seq in sequences[0]] == [seq.tokens for seq in sequences[1]]
    return drafters, sequences


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


def both(drafters: list[HeadDrafter], sequences: list[list[Sequence]], budgets: list[Budget], some: slice) -> None:
    defined, mine = (each.propose(seqs[some], budgets[some]) for each, seqs in zip(drafters, sequences, strict=True))
    compare(mine, defined)


WORLD = World(page_size=7, pages=170, budget=2)
SOME = [slice(0, 1), slice(0, None)]


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_a_chain_equals_the_reference(config: HeadConfig) -> None:
    drafters, sequences = waiting(config)
    for some in SOME:
        both(drafters, sequences, [Budget(5)] * len(LONG), some)
        both(drafters, sequences, [Budget(1 + i % 4, min_probability=0.003 * i) for i in range(len(LONG))], some)


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_a_tree_equals_the_reference(config: HeadConfig) -> None:
    drafters, sequences = waiting(config)
    shapes = [(6, 3), (30, 3), (24, 6), (3, 2), (40, 2), (12, 5)]
    for some in SOME:
        for shape in shapes[:3]:
            both(drafters, sequences, [Budget(shape[0], max_depth=shape[1])] * len(LONG), some)
        mixed = [Budget(nodes, max_depth=levels, min_probability=0.001 * i) for i, (nodes, levels) in enumerate(shapes)]
        both(drafters, sequences, mixed, some)
        both(drafters, sequences, [Budget(5) if i % 2 else each for i, each in enumerate(mixed)], some)


@pytest.mark.parametrize("name", ["eagle", "eagle of two layers", "distilled"])
def test_a_tree_with_ties_equals_the_reference(name: str) -> None:
    """Which of equally likely tokens are taken is open; which branches are expanded is not."""
    drafters, sequences = waiting(HEADS[name])
    for drafter in drafters:
        same = torch.tensor([3.0, 3.0] + [0.0] * (drafter.head.config.outputs - 2))
        drafter.head.logits = lambda states, same=same: same.expand(len(states), -1)  # type: ignore[misc]
    for nodes, levels in ((9, 4), (20, 6), (30, 3), (12, 7)):
        budgets = [Budget(nodes - i % 3, max_depth=levels) for i in range(len(LONG))]
        defined, mine = (each.propose(seqs, budgets) for each, seqs in zip(drafters, sequences, strict=True))
        assert [draft.parents for draft in mine] == [draft.parents for draft in defined]
        assert any(parent > 0 for draft in mine for parent in draft.parents)


def test_branches_outside_the_width_displace_no_node() -> None:
    """Eight branches outside the width have more likely children than the two inside."""
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


def test_a_level_keeps_the_order_in_which_it_was_found() -> None:
    """As on the host, where the first found of equal nodes wins, not the one with the more likely parent."""
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
@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_sampled_drafts_equal_the_reference(config: HeadConfig, rule: str) -> None:
    """Each sequence with its own noise, and some of them greedy."""
    for temperatures in ((0.8,), (0.0, 1.3, 0.7)):
        drafters, sequences = waiting(config, rule, temperatures)
        for some in SOME:
            both(drafters, sequences, [Budget(4, min_probability=0.002 * i) for i in range(len(LONG))], some)
            both(drafters, sequences, [Budget(8 + 4 * i, max_depth=3) for i in range(len(LONG))], some)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_a_sequence_may_finish_before_the_others_are_drafted(config: HeadConfig, whole: bool) -> None:
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
    """Drafts and prefills with single graphs, and compares with a fresh reference head."""

    def __init__(self, config: HeadConfig, page_size: int, other: Drafter) -> None:
        super().__init__(config, page_size, other)
        self.settings = {"single_graph": True}


@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_drafts_and_kv_equal_the_reference_over_many_steps(config: HeadConfig, levels: int) -> None:
    """With prefix cache hits, preempted sequences, and sequences that other drafters drafted for."""
    if levels and config.kind == "medusa":
        pytest.skip("the shape of its trees depends on which draft tokens were accepted before")
    for name, temperature in (("page 16, short steps", 0.0), ("few pages", 1.0)):
        truth = truth_for("sampled" if temperature else "greedy")
        world = replace(LAWS[name], levels=levels, budget=10 if levels else 6)
        compared = Whole(config, world.page_size, tree_around(truth))
        assert generate(compared, world, preempt_youngest, temperature=temperature) == truth
        assert compared.compared > 10


@pytest.mark.parametrize("sampling", SAMPLING)
def test_single_graph_drafts_are_lossless_under_all_sampling_settings(sampling: str) -> None:
    for name, levels in (("eagle", 0), ("eagle", 3), ("block", 3)):
        drafter = OwnHead(HEADS[name], single_graph=True)
        assert generate(drafter, World(levels=levels, budget=9), **SAMPLING[sampling]) == truth_for(sampling)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_single_graph_drafts_are_verified_under_other_rules(rule: str) -> None:
    engine = World().engine(OwnHead(HEADS["eagle"], single_graph=True))
    choice = SpeculationChoice(rule=rule)
    states = [add(engine, str(i), prompt, choice, temperature=1.0)[0] for i, prompt in enumerate(PROMPTS)]
    run(engine)
    assert engine.stats.speculation.drafted > 50 and all(state.seq.finish_reason for state in states)


class Unlookable(TorchDispatchMode):
    """Raises on what a graph cannot capture: reading values, shapes that depend on them, copies from the host."""

    refused = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "bincount", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = [each for each in args[1] if each is not None] if name in ("index", "index_put", "index_put_") else []
        if name.startswith(self.refused) or any(mask.dtype == torch.bool for mask in masks):
            raise AssertionError(f"{name} is no work for a graph")
        return func(*args, **(kwargs or {}))


class Watched(GraphCache[Any, Any]):
    """Runs all work as it would be captured."""

    def __call__(self, sizes: Any, run: Callable[[], Any], keep: bool = True) -> Any:
        self.graphs[sizes] = None
        with Unlookable():
            return run()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_the_graph_never_reads_values_on_the_host(config: HeadConfig, temperature: float) -> None:
    engine = World(budget=9, levels=3).engine(drafter := OwnHead(config, single_graph=True))
    inner: Any = drafter.inner
    inner._graph.graphs, inner._graph_prefill.graphs = (Watched(torch.device("cpu")) for _ in range(2))
    for i, prompt in enumerate(PROMPTS):
        add(
            engine,
            str(i),
            prompt,
            SpeculationChoice(max_draft=3) if i % 2 else SpeculationChoice(),
            temperature=temperature,
        )
    run(engine)
    assert len(inner._graph.graphs.graphs) > 3 and len(inner._graph_prefill.graphs.graphs) > 2
    with pytest.raises(AssertionError, match="no work for a graph"), Unlookable():
        torch.ones(3).tolist(), torch.ones(1).item()


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_old_table_contents_do_not_matter(config: HeadConfig) -> None:
    """The same buffers serve other sequences, more and fewer, longer and shorter."""
    drafters, sequences = waiting(config)
    whole: Any = drafters[1]
    whole._graph.tables.clear()
    for budgets in ([Budget(4)] * len(LONG), [Budget(14, max_depth=3)] * len(LONG)):
        for order in ((0, 1, 2, 5), (5, 4, 3), (2, 5, 0, 1), (3, 3, 3)):
            defined, mine = (
                each.propose([seqs[i] for i in order], [budgets[i] for i in order])
                for each, seqs in zip(drafters, sequences, strict=True)
            )
            compare(mine, defined)
    assert len(whole._graph.tables) == 2, "one for chains and one for trees"


@pytest.mark.parametrize("positions", [[5] * 9, [3, 2000, 7, 60, 60, 5], [300, 5, 5, 5, 5, 5, 5, 5], [5000], [1]])
def test_batches_are_split_into_bounded_passes(positions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_tables, "MAX_POSITIONS", 2048)
    sequences = [DraftRow(1, position, position - 1, []) for position in positions]
    cut = head_tables.split_batch(sequences)
    assert [text for some in cut for text in sequences[some]] == sequences
    sizes = [head_tables.draft_shape(sequences[some], 1) for some in cut]
    assert all(each.is_small or len(sequences[some]) == 1 for each, some in zip(sizes, cut, strict=True))
    merged = [slice(a.start, b.stop) for a, b in zip(cut, cut[1:], strict=False)]
    assert all(len(sequences[some]) > 1 for some in merged), "no pass is empty"


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_several_passes_equal_the_reference(config: HeadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters, sequences = waiting(config, temperatures=(0.0, 1.0))
    monkeypatch.setattr(head_tables, "MAX_POSITIONS", 1024)  # two sequences at once
    whole: Any = drafters[1]
    whole._graph.tables.clear()
    for budgets in ([Budget(4)] * len(LONG), [Budget(14, max_depth=3)] * len(LONG)):
        both(drafters, sequences, budgets, slice(0, None))
    assert max(sizes.sequences for sizes in whole._graph.tables) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
def test_a_padded_draft_is_the_same(config: HeadConfig, temperature: float) -> None:
    """Padded in depth, width, batch and length."""
    drafters, sequences = waiting(config, temperatures=(temperature,))
    whole: Any = drafters[1]
    deepest = min(6, whole.max_depth)
    whole._graph.graphs = (tape := FakeCapture()).recorder()
    with capture_now():
        for budget in (Budget(deepest), Budget(40, max_depth=deepest)):
            whole.propose(sequences[1], [budget] * len(sequences[1]))
    recorded = tape.count
    for some in SOME:
        both(drafters, sequences, [Budget(max(1, deepest - 2))] * len(LONG), some)
        both(
            drafters,
            sequences,
            [Budget(8 + i, max_depth=max(2, deepest - 2), min_probability=0.001 * i) for i in range(6)],
            some,
        )
    assert tape.count == recorded and sum(whole._graph.graphs.policy.requests.values()) >= 2


@pytest.mark.parametrize("config", WITH_CACHE.values(), ids=WITH_CACHE)
@torch.inference_mode()
def test_a_padded_prefill_stores_the_same(config: HeadConfig) -> None:
    """The same positions are read with exact and with padded rows and columns."""
    drafters, sequences = waiting(config)
    head, seq = drafters[1], sequences[1][-1]
    reader, pages = head._graph_prefill, head.pages
    assert reader is not None
    keys, values, features = pages.caches
    kept = [*keys, *values, *([] if features is None else [features])]
    states = torch.randn(30, config.input_width, generator=torch.Generator().manual_seed(0))
    found: list[list[torch.Tensor]] = []
    for serves in (False, True):
        reader.graphs = (tape := FakeCapture()).recorder()
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
