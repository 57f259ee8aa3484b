"""Successive halving with a simulated clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import yaml

from foretell.bench.measure import PLAIN, MeasureJob, TimedOutput, Variant
from foretell.bench.prompt import BenchPrompt
from foretell.bench.results import TaskCell
from foretell.bench.settings import BenchSettings
from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.tune.search_space import SearchSpace, interleave_tasks, is_sampled, serve_settings
from foretell.tune.successive_halving import SuccessiveHalving, choose_variant, config_text, evidence, num_rungs
from tests.bench.fakes import FakeBackend, ignore_progress, items, variants

PLAIN_SECONDS = 1.0  # per token


class TimedBackend(FakeBackend):
    """A backend with given speeds that advances a clock by what it generates."""

    def __init__(self, speeds: dict[str, float], noise: float = 0.0, wrong: str = "") -> None:
        rng = random.Random(5)

        def seconds(variant: str, job: MeasureJob, time: int) -> float:
            return PLAIN_SECONDS / speeds.get(variant, 1.0) * rng.lognormvariate(0, noise)

        super().__init__(seconds, lambda variant, job: tuple(range(10)) if variant == wrong else tuple(range(11)))
        self.now = 0.0

    def generate(self, variant: Variant, job: MeasureJob) -> TimedOutput:
        output = super().generate(variant, job)
        self.now += output.total_seconds
        return output


def search(backend: TimedBackend, names: list[str], budget: float, **tasks: int) -> SuccessiveHalving:
    prompts = interleave_tasks(items(**(tasks or {"chat": 6, "code": 6})))
    return SuccessiveHalving(
        backend, variants(*names), prompts, BenchSettings(), budget, lambda: backend.now, ignore_progress
    )


NAMES = [f"variant {i}" for i in range(12)]


def test_the_best_variant_is_found_and_ran_the_most_prompts() -> None:
    speeds = {name: 1 + i / 10 for i, name in enumerate(NAMES)}
    backend = TimedBackend(speeds, noise=0.05)
    found = search(backend, NAMES, budget=4000.0)
    found.run()
    assert [len(rung.variants) for rung in found.rungs] == [12, 4, 2]
    (best, cell), *others = found.ranking()
    assert best.name == "variant 11" and cell.speedup == pytest.approx(2.1, rel=0.05)
    assert sum(name == "variant 11" for name, _ in backend.log) > 2 * sum(
        name == "variant 0" for name, _ in backend.log
    )
    assert len(others) == 11, "the others are ranked as well"
    assert backend.now <= 4000 * 1.1 and backend.now >= 4000 * 0.8
    assert sum(name == PLAIN.name for name, _ in backend.log) == sum(rung.num_prompts for rung in found.rungs)


def test_variants_are_compared_on_the_same_prompts() -> None:
    backend = TimedBackend({})
    found = search(backend, NAMES[:4], budget=600.0)
    found.run()
    assert len(found.rungs) == 2
    for variant in found.variants:
        wanted = sum(rung.num_prompts for rung in found.rungs if variant in rung.variants)
        assert sum(name == variant.name for name, _ in backend.log) == wanted
    orders = {tuple(name for name, item in backend.log[i * 5 : i * 5 + 5]) for i in range(found.rungs[0].num_prompts)}
    assert len(orders) > 1, "no variant is always first"


def test_a_short_budget_still_runs_every_variant_once() -> None:
    backend = TimedBackend({"variant 3": 2.0})
    found = search(backend, NAMES, budget=1.0)
    found.run()
    assert {name for name, _ in backend.log} == {PLAIN.name, *NAMES}
    assert found.ranking()[0][0].name == "variant 3"


def test_results_survive_an_interrupt() -> None:
    backend = TimedBackend({"variant 2": 3.0})
    num_rungs_done: list[int] = []
    found = search(backend, NAMES, budget=3000.0)
    found.after = lambda: num_rungs_done.append(len(found.rungs))
    backend.stop_after = 200  # during the second rung
    with pytest.raises(KeyboardInterrupt):
        found.run()
    assert num_rungs_done == [1] and len(found.rungs) == 2, "the interrupted rung counts as far as it ran"
    best, cell = found.ranking()[0]
    assert best.name == "variant 2" and cell.speedup == pytest.approx(3.0)
    assert len(found.ranking()) == 12


def test_an_interrupt_before_the_first_sample_leaves_nothing() -> None:
    backend = TimedBackend({})
    found = search(backend, NAMES, budget=3000.0)
    backend.stop_after = 0
    with pytest.raises(KeyboardInterrupt):
        found.run()
    assert not found.rungs and not found.ranking()


def test_the_number_of_rungs() -> None:
    assert [num_rungs(n) for n in (1, 2, 3, 6, 7, 12, 29)] == [1, 1, 2, 2, 3, 3, 4]


def chosen(speeds: dict[str, float], noise: float = 0.01, wrong: str = "") -> tuple[str, str]:
    backend = TimedBackend(speeds, noise, wrong)
    found = search(backend, list(speeds), budget=500.0)
    found.run()
    result = choose_variant(found.ranking())
    return result.variant.name, result.summary


def test_only_a_significantly_faster_variant_is_chosen() -> None:
    assert chosen({"fast": 1.5, "slow": 0.5})[0] == "fast"
    name, summary = chosen({"even": 1.0, "slow": 0.5}, noise=0.1)
    assert name == PLAIN.name and "not significantly faster" in summary and "--budget" in summary
    assert choose_variant([]).variant == PLAIN


def test_an_uncertain_variant_does_not_block_a_certain_one() -> None:
    found = search(TimedBackend({"a": 1.5, "b": 1.2}, noise=0.01), ["a", "b"], budget=500.0)
    found.run()
    (first, uncertain), (second, certain) = found.ranking()
    ranking = [(first, replace(uncertain, speedup_interval=(0.9, 2.1))), (second, certain)]
    assert choose_variant(ranking).variant.name == "b"
    even = replace(certain, speedup_interval=(1.0, 1.4))
    result = choose_variant([ranking[0], (second, even)])
    assert result.variant == PLAIN and "the best variant, a, is not significantly faster" in result.summary, (
        "1 is not above 1"
    )
    assert choose_variant([(first, replace(uncertain, speedup_interval=None)), (second, even)]).variant == PLAIN


def test_a_variant_with_another_output_is_never_chosen() -> None:
    name, summary = chosen({"wrong": 3.0, "right": 1.5}, wrong="wrong")
    assert name == "right" and summary.startswith("right: 1.5")


def test_tasks_with_one_prompt_share_an_interval() -> None:
    backend = TimedBackend({"a": 1.5}, noise=0.05)
    found = search(backend, ["a", "b"], budget=100.0, chat=1, code=1, math=1, story=1)
    found.run()
    (variant, cell), _ = found.ranking()
    assert variant.name == "a" and cell.sequences == 4 and cell.speedup_interval is not None and cell.task == "all"


def test_the_evidence_has_speedups_with_intervals() -> None:
    backend = TimedBackend({"a": 1.5}, noise=0.05)
    found = search(backend, ["a", "b"], budget=300.0)
    found.run()
    first = evidence(found.ranking())[0]
    assert first["arm"] == "a" and first["same_text"] is True and first["texts"] > 4
    assert first["speedup_interval"][0] <= first["speedup"] <= first["speedup_interval"][1]


def test_the_search_space() -> None:
    base = SpeculationConfig()
    greedy = SearchSpace(["ngram", "self:int4", "auto", "ngram+suffix"], [2, 4], sampled=False).variants(base)
    assert [variant.name for variant in greedy] == [
        "ngram, adapting", "ngram, 2 tokens", "ngram, 4 tokens",
        "self:int4, adapting", "self:int4, 2 tokens", "self:int4, 4 tokens", "auto, adapting", "ngram+suffix, adapting",
    ]  # fmt: skip
    assert greedy[-1].speculation.drafter == "ngram,suffix"
    sampled = SearchSpace(["ngram", "self:int4"], [4], sampled=True).variants(base)
    rules = {variant.name: variant.speculation.rule for variant in sampled}
    assert rules["self:int4, 4 tokens, block"] == "block" and "ngram, 4 tokens, block" not in rules
    with pytest.raises(RequestError, match="leave it out"):
        SearchSpace(["none"], [4], sampled=False).variants(base)


def test_tasks_are_interleaved_and_sampling_is_detected() -> None:
    assert [item.task for item in interleave_tasks(items(a=3, b=1))] == ["a", "b", "a", "a"]
    sampled = BenchPrompt("x", "chat", sampling={"temperature": 0.7})
    assert (
        is_sampled([sampled], None)
        and not is_sampled([sampled], 0.0)
        and is_sampled([], 1.0)
        and not is_sampled([], None)
    )


def test_settings_contain_what_differs_from_the_defaults() -> None:
    variant = Variant("x", SpeculationConfig(drafter="ngram", num_speculative_tokens=4, rule="block"))
    assert serve_settings(variant, {"model": "m"}) == {
        "model": "m", "drafter": "ngram", "num_speculative_tokens": 4, "rule": "auto"
    }  # fmt: skip
    assert serve_settings(PLAIN, {}) == {"drafter": "none"}


def test_requests_with_a_seed_keep_their_output_if_block_is_faster() -> None:
    variant = Variant("x", SpeculationConfig(drafter="self:int4", rule="block"))
    assert serve_settings(variant, {})["rule"] == "auto" and serve_settings(variant, {}, "block")["rule"] == "block"
    ranking = [(variant, cell_of_block())]
    text = config_text(choose_variant(ranking), ranking, {"model": "m"}, {"rule": "match"})
    assert yaml.safe_load(text)["rule"] == "auto" and "those with one keep their output" in text


def cell_of_block() -> TaskCell:
    """Return a significantly faster result of a rule that guarantees the distribution alone."""
    found = search(TimedBackend({"a": 1.5}, noise=0.01), ["a"], budget=300.0)
    found.run()
    return replace(found.ranking()[0][1], same_text=None)
