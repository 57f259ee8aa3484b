"""Writes the texts of a bench with our own engine and takes the time."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from foretell.bench.drafter_slots import DrafterSlot, DrafterSlots
from foretell.bench.latency import AcceptanceByDepth
from foretell.bench.measure import PLAIN, MeasureJob, TimedOutput, Variant
from foretell.bench.plan import Plan
from foretell.bench.prompt import BenchPrompt
from foretell.engine.sequence_state import SequenceState
from foretell.engine.stats import SpeculationStats
from foretell.llm import LLM
from foretell.sampling_params import SamplingParams
from foretell.structured_output import GrammarSpec
from foretell.tokenizer import StreamDecoder
from foretell.types import Request, SpeculationChoice


@dataclass(frozen=True)
class Course:
    """How texts were written. Times are seconds; `decoding` begins when the last of them has its first token."""

    tracks: tuple[SequenceState, ...]
    whole: float
    decoding: float
    early: int  # tokens that were there before
    pace: tuple[tuple[float, int], ...]  # then for each step and text: the step's seconds, the tokens it brought

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(track.seq.tokens[len(track.seq.request.prompt) :]) for track in self.tracks)

    @property
    def steps(self) -> int:
        """Forwards that gave a text a token, summed over texts."""
        return sum(track.speculation.steps for track in self.tracks)

    @property
    def timed(self) -> int:
        """Tokens that came while decoding was timed."""
        return sum(map(len, self.texts)) - self.early


def write(llm: LLM, requests: Sequence[Request]) -> Course:
    """Write all of them to their ends, from one batch; nobody else may be served meanwhile."""
    engine = llm.engine
    grammars = [request.params.structured_outputs for request in requests]
    compiled = [None if wanted is None else llm.assembly.grammars.compile(wanted) for wanted in grammars]
    began = perf_counter()
    try:
        tracks = [engine.add(request, grammar) for request, grammar in zip(requests, compiled, strict=True)]
        while any(track.timings.first_token is None for track in tracks):
            engine.step()
        first, early = perf_counter(), sum(track.seq.num_output_tokens for track in tracks)
        pace: list[tuple[float, int]] = []
        _drain(tracks)
        last = first
        while engine.busy:
            engine.step()
            now = perf_counter()
            pace += [(now - last, count) for count in _drain(tracks) if count]
            last = now
    finally:
        for request in requests:  # where all went well there is nothing left to abort
            engine.abort(request.id)
    return Course(tuple(tracks), last - began, last - first, early, tuple(pace))


def _drain(tracks: Sequence[SequenceState]) -> list[int]:
    """The tokens each text got since it was last asked."""
    counts: list[int] = []
    for track in tracks:
        counts.append(sum(len(delta.tokens) for delta in track.outbox))
        track.outbox.clear()
    return counts


WARM_UP = "Count from one to ten and back again."  # no item of a workload: who learns from it learns nothing of use
WARM_UP_TOKENS = 8
NO_GUESS = SpeculationChoice(enabled=False)


class EngineBackend:
    """Arms take turns on one engine. The prompt is in its cache before they do, so that none of them pays for it."""

    def __init__(self, llm: LLM, seats: DrafterSlots) -> None:
        self.llm, self._make = llm, seats
        self._plain = seats.make(PLAIN.speculation)
        self._seats: dict[str, DrafterSlot] = {}
        self._answers: dict[tuple[str, int, int], str] = {}  # to the turns before the last
        self._names = itertools.count()

    def refresh(self, arms: Sequence[Variant]) -> None:
        self._seats.clear()  # first the old ones go, with their memory
        self._seats |= {arm.name: self._make.make(arm.speculation) for arm in arms}
        prompt = self.encode(({"role": "user", "content": WARM_UP},))
        for seat in self._seats.values():
            seat.take()
            self.llm.generate([prompt], SamplingParams(max_tokens=WARM_UP_TOKENS))

    def fits(self, item: BenchPrompt, plan: Plan) -> bool:
        """Whether the whole conversation has room in the model's context."""
        asked = len(self._prompt(item)) + sum(len(self.llm.tokenizer.encode(turn)) for turn in item.turns)
        turns = len(item.turns) + 1
        margin = 16 * len(item.turns)  # what a chat template puts between messages
        return asked + margin + turns * _max_tokens(item, plan) <= self.llm.assembly.requests.limits.context

    def prepare(self, item: BenchPrompt, temperature: float | None, plan: Plan) -> list[MeasureJob]:
        self._plain.take()
        prompt, params = self._prompt(item), params_for(item, temperature, plan)
        jobs = [MeasureJob(item.id, item.task, 0, tuple(prompt), params, item.prediction)]
        messages = list(item.messages)
        for turn, question in enumerate(item.turns, start=1):
            answer = self._answer(item, turn - 1, prompt, params.max_tokens or 1)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
            prompt = self.encode(messages)
            jobs.append(MeasureJob(item.id, item.task, turn, tuple(prompt), params))
        for job in jobs:
            self.llm.generate([list(job.prompt)], SamplingParams(max_tokens=1), speculation=NO_GUESS)
        return jobs

    def write(self, arm: Variant, job: MeasureJob) -> TimedOutput:
        seat, stats = self._seats[arm.name], self.llm.engine.stats
        seat.take()
        seat.drafter.take_drafts()
        drafting, running, failures = seat.drafter.seconds, stats.target_seconds, stats.drafter_failures
        course = write(self.llm, [self._request(arm, each) for each in job.all])
        return TimedOutput(
            tokens=tuple(token for text in course.texts for token in text),
            steps=course.steps,
            decoding=course.decoding,
            whole=course.whole,
            drafting=seat.drafter.seconds - drafting,
            running=stats.target_seconds - running,
            failures=stats.drafter_failures - failures,
            promised=all(_promises(track.speculation, job.params) for track in course.tracks),
            timed=course.timed,
            pace=course.pace,
            places=AcceptanceByDepth.counted(seat.drafter.take_drafts()),
            origins=tuple(origin for track in course.tracks for origin in track.speculation.origins),
            lengths=tuple(map(len, course.texts)),
        )

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """The words of each token; those of one that ends inside a character come with the next."""
        decoder = StreamDecoder(self.llm.tokenizer, skip_special=False)
        words = [decoder.push([token]) for token in tokens]
        return [*words[:-1], words[-1] + decoder.flush()] if words else []

    def _request(self, arm: Variant, job: MeasureJob) -> Request:
        choice = SpeculationChoice(prediction=job.prediction if arm.reads_prediction else None)
        choice = NO_GUESS if arm == PLAIN else choice
        (request,) = self.llm.assembly.requests.make(f"bench-{next(self._names)}", list(job.prompt), job.params, choice)
        return request

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """As the model is asked; one without a chat template reads what was said."""
        if self.llm.tokenizer.chat_template:
            return self.llm.tokenizer.encode_chat(messages)
        said = [str(message.get("content") or "") for message in messages]
        return self.llm.tokenizer.encode("\n\n".join([*said, ""]))

    def _prompt(self, item: BenchPrompt) -> list[int]:
        return self.encode(item.messages) if item.text is None else self.llm.tokenizer.encode(item.text)

    def _answer(self, item: BenchPrompt, turn: int, prompt: list[int], max_tokens: int) -> str:
        """What the model says before the next turn: the same for every arm and temperature."""
        key = (item.id, turn, max_tokens)
        if key not in self._answers:
            params = SamplingParams(max_tokens=max_tokens)
            (output,) = self.llm.generate([prompt], params, speculation=NO_GUESS)
            self._answers[key] = output.outputs[0].text
        return self._answers[key]


def params_for(item: BenchPrompt, temperature: float | None, plan: Plan) -> SamplingParams:
    """How an item's text is drawn: as it says, greedy where it says nothing, with a seed of its own."""
    settings = {"seed": zlib.crc32(item.id.encode()), **item.sampling, "max_tokens": _max_tokens(item, plan)}
    if temperature is not None:
        settings["temperature"] = temperature
    if item.schema is not None and plan.schemas:
        any_object = item.schema is True
        settings["structured_outputs"] = (
            GrammarSpec.json_object() if any_object else GrammarSpec.json_schema(item.schema)
        )
    return SamplingParams(**settings)


def _max_tokens(item: BenchPrompt, plan: Plan) -> int:
    return item.max_tokens if plan.max_tokens is None else min(item.max_tokens, plan.max_tokens)


def _promises(record: SpeculationStats, params: SamplingParams) -> bool:
    """Whether these very tokens are promised: `match` does always, the other lossless rules where nothing is drawn."""
    return record.rule == "match" or (record.lossless and params.temperature == 0)
