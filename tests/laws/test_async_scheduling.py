"""A step that begins before its tokens are known changes when they come, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from foretell.draft.base import Drafter
from foretell.engine.engine import Engine
from foretell.types import SpeculationChoice
from tests.laws.test_losslessness import DRAFTERS, SAMPLING, Truth, truth_for
from tests.outruns import LeavesUnseen, Left, Outruns, Sometimes
from tests.tiny import HEADS, PROMPTS, OwnHead, World, add, check_pages, model_drafter, run

WORLDS = {
    "page 4": World(),
    "page 1": World(page_size=1, pages=600),
    "few pages": World(page_size=4, pages=12, max_num_seqs=5),
    "two at a time": World(max_num_seqs=2, prefix_cache=False),
}
HEADED = {f"head: {name}": lambda truth, config=config: OwnHead(config) for name, config in HEADS.items()}
ALL: dict[str, Callable[[Truth], Drafter | None]] = {"nobody": lambda truth: None, **DRAFTERS, **HEADED}


def outrunning(world: World, drafter: Drafter | None, seed: int = 0) -> tuple[Engine, Outruns]:
    engine = world.engine(drafter)
    executor = engine.runner.executor = Outruns(engine.runner.executor)
    if drafter is not None:
        engine.controller = Sometimes(world.budget, world.levels, seed)
    return engine, executor


def written(engine: Engine, after_step: Callable[[Engine], None] = lambda engine: None, **params: object) -> Truth:
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt, **params)]
    run(engine, after_step)
    assert engine.runner.pool.num_held == 0, "all pages are back"
    return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("sampling", ["greedy", "top p", "stop token"])
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_the_text_is_the_same(make: Callable[[Truth], Drafter | None], sampling: str, world: World) -> None:
    truth = truth_for(sampling)
    engine, executor = outrunning(world, make(truth))
    assert written(engine, **SAMPLING[sampling]) == truth
    assert executor.sent


CHAINS = {
    name: DRAFTERS[name]
    for name in ("the same model", "another model", "another model, few pages", "suffix", "oracle that errs")
}


@pytest.mark.parametrize("sampling", ["greedy", "top p", "stop token"])
@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_guesses_that_nobody_has_seen_do_not_change_it_either(make: Callable[[Truth], Drafter], sampling: str) -> None:
    truth = truth_for(sampling)
    for world in (World(), World(page_size=4, pages=12, max_num_seqs=5)):
        engine, executor = outrunning(world, drafter := LeavesUnseen(make(truth)))
        assert written(engine, **SAMPLING[sampling]) == truth
        assert executor.unseen and drafter.left
        counts = engine.stats.speculation
        assert counts.tokens - counts.steps <= counts.accepted <= counts.drafted  # a text may end with a guess


def test_guesses_that_cannot_be_had_cost_themselves_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(left: Left) -> tuple[list[int], list[float]]:
        raise RuntimeError("the device has other things to do")

    monkeypatch.setattr(Left, "wait", lost)
    truth = truth_for("greedy")
    engine, _ = outrunning(World(), LeavesUnseen(DRAFTERS["oracle"](truth)))
    tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt)]
    while engine.busy:
        engine.step()
    assert [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks] == truth
    assert engine.stats.drafter_failures and not engine.stats.speculation.accepted


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_preemption_between_two_steps_changes_nothing(make: Callable[[Truth], Drafter | None]) -> None:
    truth, rng = truth_for("sampled"), random.Random(0)

    def preempt_some(engine: Engine) -> None:
        for seq in list(engine.scheduler.running):
            if rng.random() < 0.1:
                engine.scheduler.preempt(seq)

    for world in (World(), World(prefix_cache=False)):
        engine, executor = outrunning(world, make(truth))
        assert written(engine, preempt_some, temperature=1.0) == truth
        assert executor.sent


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_an_abort_between_two_steps_touches_nobody_else(make: Callable[[Truth], Drafter | None]) -> None:
    truth = truth_for("sampled")
    for moment in range(2, 7):
        engine, _ = outrunning(World(), make(truth), moment)
        tracks = [track for i, prompt in enumerate(PROMPTS) for track in add(engine, str(i), prompt, temperature=1.0)]
        for _ in range(moment):
            engine.step()
        for gone in ("1", "3"):
            engine.abort(gone)
        check_pages(engine)
        run(engine)
        assert engine.runner.pool.num_held == 0
        for i in (0, 2, 4):
            assert tracks[i].seq.tokens[len(PROMPTS[i]) :] == truth[i]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("moment", range(2, 8))
def test_who_comes_later_finds_a_place(moment: int, alone: bool) -> None:
    """Also where all before it have ended, or were given up, in the meantime."""
    truth = truth_for("greedy")
    engine, _ = outrunning(World(), None)
    if not alone:
        add(engine, "2", PROMPTS[2], ignore_eos=True)
    first = add(engine, "0", PROMPTS[0], max_tokens=moment)
    for _ in range(moment - 1):
        engine.step()
    if moment % 2:
        engine.abort("0")
    second = add(engine, "1", PROMPTS[1])
    for _ in range(2):
        engine.step()
    assert second[0].timings.started is not None, "it waits for the step that was sent, and for no other"
    run(engine)
    assert second[0].seq.tokens[len(PROMPTS[1]) :] == truth[1]
    if not moment % 2:
        assert first[0].seq.tokens[len(PROMPTS[0]) :] == truth[0][:moment]


OTHERS: dict[str, dict[str, object]] = {
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "least tokens": {"min_tokens": 9, "stop_token_ids": [7, 8], "temperature": 1.0},
    "likelihoods": {"logprobs": 3, "temperature": 1.0},
    "of the prompt": {"prompt_logprobs": 2},
    "biased": {"logit_bias": {5: 3.0, 9: -2.0}},
}


@pytest.mark.parametrize("params", OTHERS.values(), ids=OTHERS)
def test_what_looks_back_or_asks_for_more_is_not_sent_ahead(params: dict[str, object]) -> None:
    plain = World().engine()
    right = written(plain, **params)
    engine, executor = outrunning(World(), None)
    assert written(engine, **params) == right
    if "min_tokens" in params:
        assert executor.sent, "behind the least there must be"
    else:
        assert not executor.sent


def test_a_step_that_is_sent_ahead_is_not_waited_for() -> None:
    """Plain texts of one length: after the first two every step but the last begins before the one before has ended."""
    engine, executor = outrunning(World(), None)
    for i, prompt in enumerate(PROMPTS):
        add(engine, str(i), prompt, max_tokens=20, ignore_eos=True)
    run(engine)
    assert executor.sent >= 18
    assert engine.stats.speculation.tokens == 20 * len(PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["match", "rejection", "block", "ensemble", "confidence"])
def test_each_rule_judges_as_it_does_elsewhere(rule: str, temperature: float) -> None:
    """What stands hangs on the rule also where the device has looked up the likeliest tokens already."""
    lenient = (0.05, 0.01) if rule == "confidence" else None  # so that guesses stand which the target would not choose
    choice, texts = SpeculationChoice(rule=rule, acceptance_threshold=lenient), []
    for outruns in (False, True):
        engine = World().engine(model_drafter(seed=5))
        if outruns:
            engine.runner.executor = Outruns(engine.runner.executor)
        engine.controller = Sometimes(3, seed=1)
        tracks = [add(engine, str(i), prompt, choice, temperature=temperature)[0] for i, prompt in enumerate(PROMPTS)]
        if outruns:
            engine.controller.expects_plain_step = lambda seqs: False  # type: ignore[method-assign] # so that both decide alike
        run(engine)
        texts.append([(track.seq.tokens, track.speculation.accepted) for track in tracks])
    assert texts[0] == texts[1]
    own = truth_for("sampled" if temperature else "greedy")
    if rule == "confidence":
        assert any(
            tokens[len(prompt) :] != text for (tokens, _), prompt, text in zip(texts[0], PROMPTS, own, strict=True)
        )
