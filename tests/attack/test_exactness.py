"""Random requests in a KV cache so small that sequences are preempted all the time: every token id and logprob is that
of plain decoding alone, bit for bit, whatever drafts, arrives late, is aborted or fails."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foretell.draft.base import Drafter
from foretell.draft.model import ModelDrafter
from foretell.engine.engine import Engine
from foretell.engine.fault_isolation import recover
from foretell.engine.sequence_state import SequenceState
from foretell.engine.verifier import Verifier
from foretell.kv import swap as swap_module
from foretell.kv.swap import Swap
from foretell.types import TokenLogprob
from tests.attack.random_requests import DRAFTERS, MOST_PROMPT, MOST_TOKENS, Asked, Key, Plain, key, requests, spoiled
from tests.fake_async import FakeAsyncExecutor, RandomController
from tests.tiny import World, check_pages

STEPS = 20_000  # more than any run takes


class Faults:
    """Lets parts of an engine fail now and then: a step, its memory, its verification, a copy of pages, a drafter."""

    def __init__(self, engine: Engine, rate: float, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.rng, self.rate, self.counts = random.Random(seed), rate, Counter[str]()
        runner, guard = engine.runner, engine.safe_drafter.drafter
        runner.forward = self.failing("forward", runner.forward, RuntimeError)  # type: ignore[method-assign]
        runner.forward = self.failing("memory", runner.forward, torch.OutOfMemoryError)  # type: ignore[method-assign]
        patch.setattr(Verifier, "verify", self.failing("verify", Verifier.verify, ValueError))
        for name in ("propose", "observe", "update_kv"):
            patch.setattr(guard, name, self.failing(name, getattr(guard, name), IndexError))
        for name in ("_to_host", "_to_device"):
            patch.setattr(swap_module, name, self.failing(name, getattr(swap_module, name), MemoryError))

    @property
    def steps(self) -> int:
        """Return how many steps failed."""
        return self.counts["forward"] + self.counts["memory"] + self.counts["verify"]

    def failing(self, name: str, do: Callable[..., Any], error: type[Exception]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if self.rng.random() < self.rate:
                self.counts[name] += 1
                raise error("planted")
            return do(*given)

        return call


class Attack:
    """One engine with one drafter and a tiny KV cache, and everything that happens to it."""

    def __init__(self, drafter: str, seed: int, count: int) -> None:
        asked, self.truth = requests(seed, count)
        self.rng = random.Random(f"{drafter} {seed}")
        self.engine = self._engine(DRAFTERS[drafter](self.truth))
        self.coming = list(asked)
        self.faults: Faults | None = None
        self.tracks: dict[Key, SequenceState] = {}
        self.unfinished: dict[Key, SequenceState] = {}
        self.output: dict[Key, list[int]] = {}
        self.aborted, self.lost = set[str](), set[str]()
        self.forced = self.isolated = 0  # preemptions, failed steps

    def _engine(self, drafter: Drafter) -> Engine:
        rng, size = self.rng, self.rng.choice([1, 2, 4, 8])
        largest = -(-(MOST_PROMPT + MOST_TOKENS) // size)
        pages = largest + rng.randrange(1, 3 + 8 // size)
        budget = rng.choice([2, 4, 6])
        world = World(size, pages, max_num_seqs=8, prefix_cache=rng.random() < 0.6, budget=budget)
        engine = world.engine(drafter)
        self.exact = (
            engine.runner.is_batch_invariant
        )  # without the native library the last bit of a logprob depends on the batch
        if rng.random() < 0.5:
            engine.scheduler.swap = swap = Swap(engine.runner.cache, rng.choice([1 << 13, 1 << 30]))
            swap._copy_seconds = [0.0] * swap_module.COPY_SAMPLES  # copying is faster, whatever the clock says
            swap._prefill_seconds = 1.0
        if rng.random() < 0.5:
            engine.runner.executor = FakeAsyncExecutor(engine.runner.executor)
            if rng.random() < 0.5:
                engine.controller = RandomController(budget, seed=rng.randrange(99))
        return engine

    def run(self) -> Counter[str]:
        """Return what happened, by its name."""
        for _ in range(STEPS):
            if not self.coming and not self.engine.busy:
                return self._end()
            while self.coming and (self.rng.random() < 0.7 or not self.engine.busy):
                self._arrive(self.coming.pop())
            if self.engine.busy and self.rng.random() < 0.01:
                self._abort(self.rng.choice(list(self.engine.states.values())).seq.request.id, self.aborted)
            running = self.engine.scheduler.running
            if running and self.rng.random() < 0.05:  # any sequence at any time, not only when pages run out
                self.engine.scheduler.preempt(self.rng.choice(running))
                self.forced += 1
            self._step()
            check_pages(self.engine)
        raise AssertionError("the engine never finished")

    def _arrive(self, asked: Asked) -> None:
        prediction = spoiled(self.truth[asked.name, 0].tokens, 0.2)
        tracks = {key(track): track for track in asked.add(self.engine, prediction)}
        self.tracks |= tracks
        self.unfinished |= tracks

    def _abort(self, name: str, why: set[str]) -> None:
        why.add(name)
        self.engine.abort(name)
        self.unfinished = {each: track for each, track in self.unfinished.items() if each[0] != name}

    def _step(self) -> None:
        """Step as a server does: after a failure every sequence runs alone, and only those that fail alone are lost."""
        try:
            deltas = self.engine.step()
        except Exception as error:
            if self.faults is None or "planted" not in str(error):
                raise
            before = self.faults.steps
            found = recover(self.engine, self.unfinished.values(), error)
            assert len(found.failed) <= self.faults.steps - before, "only those that failed alone"
            deltas = list(found.deltas)
            self.isolated += 1
            for name in found.failed:
                self._abort(name, self.lost)
        for delta in deltas:
            each = delta.request_id, delta.choice
            self.output.setdefault(each, []).extend(delta.tokens)
            self.tracks[each].outbox.clear()
            if delta.finish_reason is not None:
                self.unfinished.pop(each, None)

    def _end(self) -> Counter[str]:
        engine, swap = self.engine, self.engine.scheduler.swap
        for each, track in self.tracks.items():
            self._compare(track, self.truth[each], each[0] not in self.aborted | self.lost)
        assert engine.runner.pool.num_held == 0 and not engine.scheduler.running and not engine.scheduler.waiting
        assert not self.unfinished and (swap is None or swap.used == 0)
        for arm in engine.drafter.drafters.values():
            assert not isinstance(arm, ModelDrafter) or arm.runner.pool.num_held == 0
        counts = engine.stats.speculation
        return Counter(
            requests=len({name for name, _ in self.tracks}), tokens=sum(map(len, self.output.values())),
            preempted=engine.scheduler.preemptions - self.forced, forced=self.forced,
            drafted=counts.drafted, accepted=counts.accepted,
            rejected=counts.drafted - counts.accepted, aborted=len(self.aborted), lost=len(self.lost),
            swapped=0 if swap is None else swap.swapped_in, isolated=self.isolated, sheds=engine.oom_backoff.num_ooms,
        )  # fmt: skip

    def _compare(self, track: SequenceState, plain: Plain, whole: bool) -> None:
        output = self.output.get(key(track), [])
        assert output == plain.tokens[: len(output)] and (not whole or len(output) == len(plain.tokens))
        if self.exact:
            expected = plain.logprobs[: len(output)]
            assert [*map(bits, track.logprobs[: len(expected)])] == [*map(bits, expected)]
            if whole:
                assert track.prompt_logprobs == plain.prompt_logprobs


def bits(logprob: TokenLogprob) -> tuple[object, ...]:
    return logprob.token, logprob.rank, logprob.logprob.hex(), tuple((token, each.hex()) for token, each in logprob.top)


def attack(seeds: range, count: int, fault_rate: float = 0.0, every: int = 1) -> Counter[str]:
    """Attack an engine with each drafter, or each `every`-th, and return what happened in all of them."""
    total = Counter[str]()
    for seed in seeds:
        for name in list(DRAFTERS)[seed % every :: every]:
            each = Attack(name, seed, count)
            with pytest.MonkeyPatch.context() as patch:
                if fault_rate:
                    each.faults = Faults(each.engine, fault_rate, seed, patch)
                try:
                    total += each.run()
                except Exception as error:
                    raise AssertionError(f"{name}, seed {seed}: {error}") from error
            if each.faults is not None:
                total.update(each.faults.counts)
            else:
                assert each.engine.stats.drafter_failures == 0, name
    print(dict(total))
    return total


def check(found: Counter[str], **least: int) -> None:
    """Expect that each of these happened so often at least."""
    assert not {name: found[name] for name, count in least.items() if found[name] < count}


def test_output_is_that_of_plain_decoding() -> None:
    found = attack(range(1), 6)
    check(found, requests=200, preempted=120, forced=30, aborted=5, swapped=20)
    check(found, drafted=3000, accepted=300, rejected=2000)


def test_failures_change_no_token() -> None:
    found = attack(range(1, 2), 8, fault_rate=0.02, every=3)
    check(found, preempted=30, drafted=500, accepted=50, isolated=15, sheds=5)
    check(found, forward=5, memory=5, verify=5, propose=2, observe=5, update_kv=2, _to_host=1, _to_device=1)
    assert found["lost"] < found["requests"] / 4


@pytest.mark.slow
def test_output_is_that_of_plain_decoding_for_thousands_of_requests() -> None:
    found = attack(range(2, 12), 16)
    check(found, requests=6000, preempted=6000, forced=1000, aborted=200, swapped=1000)
    check(found, drafted=100_000, accepted=10_000, rejected=60_000)


@pytest.mark.slow
def test_failures_change_no_token_of_thousands_of_requests() -> None:
    found = attack(range(12, 17), 16, fault_rate=0.02)
    check(found, requests=3000, preempted=2000, isolated=1000, sheds=300, lost=1)
    assert found["lost"] < found["requests"] / 4
