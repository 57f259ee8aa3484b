"""Writes the texts of a bench with our own engine and takes the time."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.engine.stats import SpeculationStats
from foretell.llm import LLM
from foretell.sampling_params import SamplingParams
from foretell.structured_output import GrammarSpec
from foretell.tokenizer import StreamDecoder
from foretell.types import Request, SpeculationChoice

from .acceptance_by_depth import AcceptanceByDepth
from .drafter_slots import DrafterSlot, DrafterSlots
from .measure import PLAIN, MeasureJob, TimedOutput, Variant
from .plan import Plan
from .prompt import BenchPrompt
from .timed_generate import write

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
