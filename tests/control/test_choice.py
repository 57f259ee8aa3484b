"""The choice is the optimum: `choose` against a search over all drafters, lengths and trees."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, product

import pytest

from foretell.control.choice import Choice, DrafterOption, StepCostView, best_choice, choose
from foretell.control.latency_model import DraftPrices

Shape = tuple[DrafterOption, int]  # a drafter and the nodes of its chain


def random_view(rng: random.Random, count: int) -> StepCostView:
    """Return a step whose further rows cost nothing, a little or a lot."""
    row = rng.choice([0.0, 0.002, 0.02, 0.1, 0.3])
    curve = list(accumulate([1.0, *(row * rng.uniform(0.5, 1.5) for _ in range(80))]))
    gap = rng.choice([0.0, 0.1])
    return StepCostView(count, count, curve, rng.random(), rng.choice([0.0, 0.01]), gap, rng.choice([0.0, gap / 2]))


def random_options(rng: random.Random, most: int, rising: bool = False) -> list[DrafterOption]:
    options = []
    for name in rng.sample(["suffix", "recycle", "head", "model"], rng.randint(0, 4)):
        prices = None
        if name in ("head", "model"):
            prices = DraftPrices(rng.choice([0.0, 0.05, 0.5]), rng.choice([0.01, 0.1, 0.3]), rng.choice([0.0, 0.02]))
        rate = rng.uniform(0.05, 0.99)
        probs = [rate ** (depth + 1) for depth in range(rng.randint(1, most))]
        options.append(DrafterOption(name, probs, prices, rng.choice([0.0, 0.01])))
    return options


def speed_alone(view: StepCostView, option: DrafterOption, nodes: int) -> float:
    """Return the speedup of one sequence, computed directly from the definition."""
    share, count = view.plain_seconds / view.num_decoding, view.num_decoding
    extra = (view.curve[view.rows + nodes * count] - view.curve[view.rows]) / count + nodes * view.row_context_seconds
    start, level, node, _ = option.prices or DraftPrices()
    hidden = view.hidden_gap if option.prices is not None else 0.0
    drafting = (start + level * nodes + view.host_gap - hidden) / count + node * nodes + option.prefill_seconds
    return (1 + sum(option.accept_probs[:nodes])) * share / (share + extra + drafting)


@pytest.mark.parametrize("seed", range(600))
def test_the_choice_of_one_sequence_is_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    view, options = random_view(rng, rng.choice([1, 1, 3, 8])), random_options(rng, 8)
    speeds = {
        (option.drafter, nodes): speed_alone(view, option, nodes)
        for option in options
        for nodes in range(1, len(option.accept_probs) + 1)
    }
    best = max(speeds.values(), default=0.0)
    found = best_choice(view, options, 0.01)
    if best <= 1.01:
        assert found == Choice()
    else:
        assert found.speedup == pytest.approx(best) == speeds[found.drafter, found.nodes]


def batch_speed(view: StepCostView, shapes: list[Shape | None], throughput: bool) -> float:
    """Return the speed of a step in which each sequence has this draft, prefill aside."""
    seconds, tokens = view.plain_seconds, [1.0] * view.num_decoding
    drafting: dict[DraftPrices, list[int]] = {}
    rows = 0
    for index, shape in enumerate(shapes):
        if shape is None:
            continue
        option, nodes = shape
        tokens[index] += sum(option.accept_probs[:nodes])
        rows += nodes
        if option.prices is not None:
            drafting.setdefault(option.prices, []).append(nodes)
    if rows:
        seconds += view.curve[view.rows + rows] - view.curve[view.rows] + rows * view.row_context_seconds
        seconds += view.host_gap - (view.hidden_gap if drafting else 0.0)
    for prices, lengths in drafting.items():
        seconds += prices.start + prices.level * max(lengths) + prices.node * sum(lengths)
    return sum(tokens) / seconds if throughput else 1 / (seconds * sum(1 / each for each in tokens) / len(tokens))


@pytest.mark.parametrize("throughput", [True, False])
@pytest.mark.parametrize("seed", range(150))
def test_the_choice_of_a_batch_is_close_to_the_optimum_and_never_below_plain(seed: int, throughput: bool) -> None:
    """The greedy allocation is exact for one drafter whose drafts cost nothing, and close to it with several."""
    rng = random.Random(seed)
    view = random_view(rng, 3)
    options = [[replace(each, prefill_seconds=0.0) for each in random_options(rng, 3)] for _ in range(3)]
    every: list[list[Shape | None]] = [
        [None, *((option, nodes) for option in mine for nodes in range(1, len(option.accept_probs) + 1))]
        for mine in options
    ]
    best = max(batch_speed(view, list(shapes), throughput) for shapes in product(*every))
    found: list[Shape | None] = []
    for choice, mine in zip(choose(view, options, 0.0, throughput), options, strict=True):
        option = next((each for each in mine if each.drafter == choice.drafter), None)
        found.append((option, choice.nodes) if option and choice.nodes else None)
    speed = batch_speed(view, found, throughput)
    assert speed >= batch_speed(view, [None] * 3, throughput) * (1 - 1e-9)
    assert speed >= 0.85 * best
    if all(option.prices is None and len(mine) == 1 for mine in options for option in mine):
        assert throughput is False or speed == pytest.approx(best)


def test_the_choices_of_batches_are_within_one_percent_of_the_optimum_on_average() -> None:
    shares = []
    for seed in range(120):
        rng = random.Random(1000 + seed)
        view = random_view(rng, 3)
        options = [[replace(each, prefill_seconds=0.0) for each in random_options(rng, 3)] for _ in range(3)]
        every: list[list[Shape | None]] = [
            [None, *((option, nodes) for option in mine for nodes in range(1, len(option.accept_probs) + 1))]
            for mine in options
        ]
        best = max(batch_speed(view, list(shapes), True) for shapes in product(*every))
        found: list[Shape | None] = []
        for choice, mine in zip(choose(view, options, 0.0, True), options, strict=True):
            option = next((each for each in mine if each.drafter == choice.drafter), None)
            found.append((option, choice.nodes) if option and choice.nodes else None)
        shares.append(batch_speed(view, found, True) / best)
    assert sum(shares) / len(shares) >= 0.99


def test_the_choice_is_pure() -> None:
    rng = random.Random(3)
    view, options = random_view(rng, 4), [random_options(rng, 6) for _ in range(4)]
    assert choose(view, options, 0.01) == choose(view, options, 0.01)
