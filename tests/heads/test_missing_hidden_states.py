"""Which sequences a head may draft for: those of which it has read every position."""

from __future__ import annotations

import pytest

from foretell.draft.heads.base import HeadDrafter
from foretell.draft.mix import MixDrafter
from foretell.engine.engine import Engine
from foretell.engine.sequence_state import SequenceState
from foretell.types import StepResult
from tests.tiny import HEADS, OwnHead, World, add, generate, run

KINDS = ["eagle", "block", "medusa", "distilled"]
PROMPT = [*range(1, 20)]  # four pages of 4 and a part of the fifth


def until_written(engine: Engine, state: SequenceState, tokens: int = 1) -> None:
    while state.seq.num_output_tokens < tokens:
        assert engine.busy
        engine.step()


def finish(engine: Engine) -> None:
    """Run the engine to the end, with drafters that may fail."""
    for _ in range(1000):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("the engine never finished")


def drafted(state: SequenceState) -> int:
    return state.speculation.drafted


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_sequence_with_a_longer_prefix_hit_gets_drafts_again(kind: str, packed: bool) -> None:
    world = World(max_step_tokens=8)
    truth = generate(world=World(), prompts=[PROMPT, PROMPT], temperature=1.0, ignore_eos=True)
    engine = world.engine(OwnHead(HEADS[kind], packed=packed))
    (first,) = add(engine, "0", PROMPT, temperature=1.0, ignore_eos=True)
    engine.step()
    assert first.seq.num_computed_tokens == 8
    engine.scheduler.preempt(first.seq)
    engine.scheduler.waiting.clear()  # the other one runs first
    (second,) = add(engine, "1", PROMPT, temperature=1.0, ignore_eos=True)
    until_written(engine, second)
    engine.scheduler.add(first.seq)
    run(engine)
    assert [state.seq.tokens[len(PROMPT) :] for state in (first, second)] == truth
    assert drafted(first) > 0, "its prefix was read for the other sequence"


class Lapse(OwnHead):
    """A head that fails in some calls of `update_kv`."""

    def __init__(self, kind: str, fails: set[int], packed: bool = True) -> None:
        super().__init__(HEADS[kind], packed=packed)
        self.fails, self.calls = fails, 0

    def update_kv(self, results: list[StepResult]) -> None:
        self.calls += 1
        head = self.inner
        assert isinstance(head, HeadDrafter)
        if self.calls not in self.fails:
            head.update_kv(results)
            return
        update = head._update_kv

        def fail(results: list[StepResult]) -> None:
            raise RuntimeError("planted")

        head._update_kv = fail  # type: ignore[method-assign]
        try:
            head.update_kv(results)
        finally:
            head._update_kv = update  # type: ignore[method-assign]


@pytest.mark.parametrize("in_a_mix", [False, True])
@pytest.mark.parametrize("fails", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_drafts_from_positions_that_were_not_read(kind: str, fails: int, in_a_mix: bool) -> None:
    head = Lapse(kind, {fails})
    prompts = [PROMPT, [*PROMPT[:16], 30]]
    truth = generate(world=World(), prompts=prompts, temperature=1.0, ignore_eos=True)
    engine = World(max_step_tokens=8, max_num_seqs=1).engine(MixDrafter([head]) if in_a_mix else head)
    first, second = (
        add(engine, str(i), prompt, temperature=1.0, ignore_eos=True)[0] for i, prompt in enumerate(prompts)
    )
    until_written(engine, first, 12)
    before_second = drafted(first)
    finish(engine)
    assert [state.seq.tokens[len(state.seq.request.prompt) :] for state in (first, second)] == truth
    assert engine.safe_drafter.failures == 1
    assert before_second == drafted(first) == 0 or fails == 4, "it lacks positions of this sequence"
    assert second.cached_prompt_tokens == 16
    assert (drafted(second) > 0) == (fails == 4), "it shares pages with the first one"
    (third,) = add(engine, "2", [7, *PROMPT], temperature=1.0, ignore_eos=True)
    finish(engine)
    assert drafted(third) > 0, "it begins on other pages"


def test_pages_that_were_not_read_are_used_again() -> None:
    head = Lapse("eagle", {1})
    engine = World(pages=16, prefix_cache=False).engine(head)
    for i in range(12):
        (state,) = add(engine, str(i), [i + 1, *PROMPT], temperature=1.0, ignore_eos=True)
        finish(engine)
        assert (drafted(state) > 0) == (i > 0)
    assert isinstance(head.inner, HeadDrafter) and not head.inner._pending.unread_pages
