"""Successive halving on a stage whose clock is a function."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import yaml

from foretell.bench.measure import PLAIN, MeasureJob, TimedOutput, Variant
from foretell.bench.plan import Plan
from foretell.bench.prompt import BenchPrompt
from foretell.bench.results import Cell
from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.tune.search_space import SearchSpace, interleave_tasks, is_sampled, serve_settings
from foretell.tune.successive_halving import SuccessiveHalving, choose_variant, config_text, evidence, num_rungs
from tests.bench.fakes import FakeStage, arms, items, watch_nothing

PLAIN_SECONDS = 1.0  # for a token


class TimedStage(FakeStage):
    """Knows how fast each arm is, and moves the clock by what it writes."""

    def __init__(self, speeds: dict[str, float], noise: float = 0.0, wrong: str = "") -> None:
        rng = random.Random(5)

        def seconds(arm: str, job: MeasureJob, time: int) -> float:
            return PLAIN_SECONDS / speeds.get(arm, 1.0) * rng.lognormvariate(0, noise)

        super().__init__(seconds, lambda arm, job: tuple(range(10)) if arm == wrong else tuple(range(11)))
        self.now = 0.0

    def write(self, arm: Variant, job: MeasureJob) -> TimedOutput:
        written = super().write(arm, job)
        self.now += written.whole
        return written


def search(stage: TimedStage, names: list[str], budget: float, **tasks: int) -> SuccessiveHalving:
    asked = interleave_tasks(items(**(tasks or {"chat": 6, "code": 6})))
    return SuccessiveHalving(stage, arms(*names), asked, Plan(), budget, lambda: stage.now, watch_nothing)


NAMES = [f"arm {i}" for i in range(12)]


def test_the_best_arm_is_found_and_had_the_most_texts() -> None:
    speeds = {name: 1 + i / 10 for i, name in enumerate(NAMES)}
    stage = TimedStage(speeds, noise=0.05)
    found = search(stage, NAMES, budget=4000.0)
    found.run()
    assert [len(rung.variants) for rung in found.rungs] == [12, 4, 2]
    (best, cell), *others = found.ranking()
    assert best.name == "arm 11" and cell.speedup == pytest.approx(2.1, rel=0.05)
    assert sum(name == "arm 11" for name, _ in stage.log) > 2 * sum(name == "arm 0" for name, _ in stage.log)
    assert len(others) == 11, "what was seen of the others is told as well"
    assert stage.now <= 4000 * 1.1 and stage.now >= 4000 * 0.8
    assert sum(name == PLAIN.name for name, _ in stage.log) == sum(rung.num_prompts for rung in found.rungs)


def test_arms_are_compared_on_the_same_texts() -> None:
    stage = TimedStage({})
    found = search(stage, NAMES[:4], budget=600.0)
    found.run()
    assert len(found.rungs) == 2
    for arm in found.variants:
        wanted = sum(rung.num_prompts for rung in found.rungs if arm in rung.variants)
        assert sum(name == arm.name for name, _ in stage.log) == wanted
    orders = {tuple(name for name, item in stage.log[i * 5 : i * 5 + 5]) for i in range(found.rungs[0].num_prompts)}
    assert len(orders) > 1, "nobody is always first"


def test_a_short_time_still_tries_everybody_once() -> None:
    stage = TimedStage({"arm 3": 2.0})
    found = search(stage, NAMES, budget=1.0)
    found.run()
    assert {name for name, _ in stage.log} == {PLAIN.name, *NAMES}
    assert found.ranking()[0][0].name == "arm 3"


def test_what_was_found_survives_a_stop() -> None:
    stage = TimedStage({"arm 2": 3.0})
    told: list[int] = []
    found = search(stage, NAMES, budget=3000.0)
    found.after = lambda: told.append(len(found.rungs))
    stage.stop_after = 200  # in the midst of the second rung
    with pytest.raises(KeyboardInterrupt):
        found.run()
    assert told == [1] and len(found.rungs) == 2, "the rung that was stopped counts as far as it came"
    best, cell = found.ranking()[0]
    assert best.name == "arm 2" and cell.speedup == pytest.approx(3.0)
    assert len(found.ranking()) == 12


def test_a_stop_before_anything_leaves_nothing() -> None:
    stage = TimedStage({})
    found = search(stage, NAMES, budget=3000.0)
    stage.stop_after = 0
    with pytest.raises(KeyboardInterrupt):
        found.run()
    assert not found.rungs and not found.ranking()


def test_rungs() -> None:
    assert [num_rungs(n) for n in (1, 2, 3, 6, 7, 12, 29)] == [1, 1, 2, 2, 3, 3, 4]


def chosen(speeds: dict[str, float], noise: float = 0.01, wrong: str = "") -> tuple[str, str]:
    stage = TimedStage(speeds, noise, wrong)
    found = search(stage, list(speeds), budget=500.0)
    found.run()
    verdict = choose_variant(found.ranking())
    return verdict.variant.name, verdict.summary


def test_only_what_is_surely_faster_is_taken() -> None:
    assert chosen({"fast": 1.5, "slow": 0.5})[0] == "fast"
    name, words = chosen({"even": 1.0, "slow": 0.5}, noise=0.1)
    assert name == PLAIN.name and "not surely faster" in words and "--budget" in words
    assert choose_variant([]).variant == PLAIN


def test_who_is_unsure_does_not_stand_before_who_is_sure() -> None:
    found = search(TimedStage({"a": 1.5, "b": 1.2}, noise=0.01), ["a", "b"], budget=500.0)
    found.run()
    (first, doubtful), (second, sure) = found.ranking()
    standing = [(first, replace(doubtful, speedup_interval=(0.9, 2.1))), (second, sure)]
    assert choose_variant(standing).variant.name == "b"
    even = replace(sure, speedup_interval=(1.0, 1.4))
    verdict = choose_variant([standing[0], (second, even)])
    assert verdict.variant == PLAIN and "the best, a, is not surely faster" in verdict.summary, "1 is not above 1"
    assert choose_variant([(first, replace(doubtful, speedup_interval=None)), (second, even)]).variant == PLAIN


def test_another_text_is_never_taken() -> None:
    name, words = chosen({"wrong": 3.0, "right": 1.5}, wrong="wrong")
    assert name == "right" and words.startswith("right: 1.5")


def test_tasks_of_one_text_have_an_interval_together() -> None:
    stage = TimedStage({"a": 1.5}, noise=0.05)
    found = search(stage, ["a", "b"], budget=100.0, chat=1, code=1, math=1, story=1)
    found.run()
    (arm, cell), _ = found.ranking()
    assert arm.name == "a" and cell.texts == 4 and cell.speedup_interval is not None and cell.task == "all"


def test_evidence_has_ratios_with_intervals() -> None:
    stage = TimedStage({"a": 1.5}, noise=0.05)
    found = search(stage, ["a", "b"], budget=300.0)
    found.run()
    first = evidence(found.ranking())[0]
    assert first["arm"] == "a" and first["same_text"] is True and first["texts"] > 4
    assert first["speedup_interval"][0] <= first["speedup"] <= first["speedup_interval"][1]


def test_the_space_of_settings() -> None:
    base = SpeculationConfig()
    greedy = SearchSpace(["ngram", "self:int4", "auto", "ngram+suffix"], [2, 4], sampled=False).variants(base)
    assert [arm.name for arm in greedy] == [
        "ngram, adapting", "ngram, 2 tokens", "ngram, 4 tokens",
        "self:int4, adapting", "self:int4, 2 tokens", "self:int4, 4 tokens", "auto, adapting", "ngram+suffix, adapting",
    ]  # fmt: skip
    assert greedy[-1].speculation.drafter == "ngram,suffix"
    sampled = SearchSpace(["ngram", "self:int4"], [4], sampled=True).variants(base)
    rules = {arm.name: arm.speculation.rule for arm in sampled}
    assert rules["self:int4, 4 tokens, block"] == "block" and "ngram, 4 tokens, block" not in rules
    with pytest.raises(RequestError, match="leave it out"):
        SearchSpace(["none"], [4], sampled=False).variants(base)


def test_tasks_take_turns_and_sampling_is_seen() -> None:
    assert [item.task for item in interleave_tasks(items(a=3, b=1))] == ["a", "b", "a", "a"]
    hot = BenchPrompt("x", "chat", sampling={"temperature": 0.7})
    assert is_sampled([hot], None) and not is_sampled([hot], 0.0) and is_sampled([], 1.0) and not is_sampled([], None)


def test_settings_are_what_differs_from_usual() -> None:
    arm = Variant("x", SpeculationConfig(drafter="ngram", num_speculative_tokens=4, rule="block"))
    assert serve_settings(arm, {"model": "m"}) == {
        "model": "m", "drafter": "ngram", "num_speculative_tokens": 4, "rule": "auto"
    }  # fmt: skip
    assert serve_settings(PLAIN, {}) == {"drafter": "none"}


def test_a_seed_keeps_its_text_where_block_is_faster() -> None:
    arm = Variant("x", SpeculationConfig(drafter="self:int4", rule="block"))
    assert serve_settings(arm, {})["rule"] == "auto" and serve_settings(arm, {}, "block")["rule"] == "block"
    standing = [(arm, cell_of_block())]
    text = config_text(choose_variant(standing), standing, {"model": "m"}, {"rule": "match"})
    assert yaml.safe_load(text)["rule"] == "auto" and "those with one get the same text" in text


def cell_of_block() -> Cell:
    """Surely faster, by a rule that promises the distribution alone."""
    found = search(TimedStage({"a": 1.5}, noise=0.01), ["a"], budget=300.0)
    found.run()
    return replace(found.ranking()[0][1], same_text=None)
