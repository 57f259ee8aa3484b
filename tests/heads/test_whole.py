"""Drafts that a head makes in one piece are those of its definition, step by step; on a CPU the same work is not
recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.draft.heads import HeadDrafter
from foretell.models.heads import HeadConfig
from foretell.types import Budget, Draft, Sequence, SpeculationChoice
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add

STEPPING = {name: config for name, config in HEADS.items() if config.kind in ("eagle", "mtp", "distilled")}
LONG = [*PROMPTS, [1 + i % 30 for i in range(45)]]


def waiting(config: HeadConfig, world: World, **params: object) -> tuple[list[HeadDrafter], list[list[Sequence]]]:
    """Twice the same texts, of several lengths, that could be guessed for now: by definition, and in one piece."""
    drafters, texts = [], []
    for whole in (False, True):
        engine = world.engine(drafter := OwnHead(config, whole=whole))
        choice = SpeculationChoice(rule=params.get("rule"))  # type: ignore[arg-type]
        settings = {name: value for name, value in params.items() if name != "rule"}
        tracks = [add(engine, str(i), prompt, choice, **settings)[0] for i, prompt in enumerate(LONG)]
        while any(track.seq.pending > 1 or not track.seq.written for track in tracks):
            engine.step()
        seqs = [track.seq for track in tracks if track.seq.finish is None]
        for seq in seqs:
            assert engine.runner.reserve(seq, len(seq.tokens) + 40)
        assert isinstance(drafter.inner, HeadDrafter) and drafter.inner.whole == whole and len(seqs) > 2
        drafters.append(drafter.inner)
        texts.append(seqs)
    assert [seq.tokens for seq in texts[0]] == [seq.tokens for seq in texts[1]]
    return drafters, texts


def compare(mine: list[Draft], defined: list[Draft]) -> None:
    for draft, truth in zip(mine, defined, strict=True):
        assert len(draft) and (draft.tokens, draft.parents, draft.drawn) == (truth.tokens, truth.parents, truth.drawn)
        assert draft.confidence == pytest.approx(truth.confidence, rel=1e-3)


def both(drafters: list[HeadDrafter], texts: list[list[Sequence]], budgets: list[Budget], some: slice) -> None:
    defined, mine = (each.propose(seqs[some], budgets[some]) for each, seqs in zip(drafters, texts, strict=True))
    compare(mine, defined)


WORLDS = {f"page {size}": World(page_size=size, pages=1200 // size, budget=2) for size in (1, 4, 7, 16)}
worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
SOME = [slice(0, 1), slice(1, 4), slice(0, None)]


@worlds
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_chain_is_that_of_the_definition(config: HeadConfig, world: World) -> None:
    drafters, texts = waiting(config, world)
    for some in SOME:
        both(drafters, texts, [Budget(5)] * len(LONG), some)
        both(drafters, texts, [Budget(1 + i % 4, floor=0.003 * i) for i in range(len(LONG))], some)


@worlds
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_a_tree_is_that_of_the_definition(config: HeadConfig, world: World) -> None:
    drafters, texts = waiting(config, world)
    shapes = [(6, 3), (30, 3), (24, 6), (3, 2), (40, 2), (12, 5)]
    for some in SOME:
        for shape in shapes[:3]:
            both(drafters, texts, [Budget(shape[0], levels=shape[1])] * len(LONG), some)
        mixed = [Budget(nodes, levels=levels, floor=0.001 * i) for i, (nodes, levels) in enumerate(shapes)]
        both(drafters, texts, mixed, some)
        both(drafters, texts, [replace(each, levels=0 if i % 2 else 3) for i, each in enumerate(mixed)], some)
