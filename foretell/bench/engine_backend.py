"""A benchmark backend that runs and times jobs on the engine in this process."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from foretell.engine.sequence_state import SequenceState
from foretell.engine.stats import SpeculationStats
from foretell.llm import LLM
from foretell.sampling_params import SamplingParams
from foretell.structured_output import GrammarSpec
from foretell.tokenizer import StreamDecoder
from foretell.types import Request, SpeculationChoice

from .drafter_slots import DrafterSlot, DrafterSlots
from .measure import PLAIN, MeasureJob, TimedOutput, Variant
from .metrics import AcceptanceByDepth
from .prompt import BenchPrompt
from .settings import BenchSettings


@dataclass(frozen=True)
class GenerateTimes:
    """Times of a batch in seconds; decoding begins when the last sequence has its first token."""

    states: tuple[SequenceState, ...]
    total_seconds: float
    decode_seconds: float
    early_tokens: int  # tokens generated before decoding began
    step_times: tuple[tuple[float, int], ...]  # (seconds, new tokens) of each later step and sequence

    @property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(state.seq.tokens[len(state.seq.request.prompt) :]) for state in self.states)

    @property
    def steps(self) -> int:
        """Return the steps that gave a sequence a token, summed over sequences."""
        return sum(state.speculation.steps for state in self.states)

    @property
    def timed_tokens(self) -> int:
        """Return the tokens generated while decoding was timed."""
        return sum(map(len, self.outputs)) - self.early_tokens


def timed_generate(llm: LLM, requests: Sequence[Request]) -> GenerateTimes:
    """Run a batch of requests to the end on an engine that serves no other request."""
    engine = llm.engine
    grammars = [request.params.structured_outputs for request in requests]
    compiled = [None if wanted is None else llm.assembly.grammars.compile(wanted) for wanted in grammars]
    began = perf_counter()
    try:
        states = [engine.add(request, grammar) for request, grammar in zip(requests, compiled, strict=True)]
        while any(state.timings.first_token is None for state in states):
            engine.step()
        first, early = perf_counter(), sum(state.seq.num_output_tokens for state in states)
        pace: list[tuple[float, int]] = []
        _drain(states)
        last = first
        while engine.busy:
            engine.step()
            now = perf_counter()
            pace += [(now - last, count) for count in _drain(states) if count]
            last = now
    finally:
        for request in requests:  # a no-op for finished requests
            engine.abort(request.id)
    return GenerateTimes(tuple(states), last - began, last - first, early, tuple(pace))


def _drain(states: Sequence[SequenceState]) -> list[int]:
    """Return the tokens each sequence got since the last call."""
    counts: list[int] = []
    for state in states:
        counts.append(sum(len(delta.tokens) for delta in state.outbox))
        state.outbox.clear()
    return counts


WARM_UP = "Count from one to ten and back again."  # in no workload, so that what a drafter learns from it does not help
WARM_UP_TOKENS = 8
NO_SPECULATION = SpeculationChoice(enabled=False)


class EngineBackend:
    """Variants take turns on one engine; each has the prompt in the prefix cache, so that none pays for prefill."""

    def __init__(self, llm: LLM, slots: DrafterSlots) -> None:
        self.llm, self._make = llm, slots
        self._plain = slots.make(PLAIN.speculation)
        self._slots: dict[str, DrafterSlot] = {}
        self._answers: dict[tuple[str, int, int], str] = {}  # of turns before the last, by (prompt, turn, max_tokens)
        self._names = itertools.count()

    def reset(self, variants: Sequence[Variant]) -> None:
        self._slots.clear()  # free the old drafters first
        self._slots |= {variant.name: self._make.make(variant.speculation) for variant in variants}
        prompt = self.encode(({"role": "user", "content": WARM_UP},))
        for slot in self._slots.values():
            slot.activate()
            self.llm.generate([prompt], SamplingParams(max_tokens=WARM_UP_TOKENS))

    def fits(self, item: BenchPrompt, settings: BenchSettings) -> bool:
        """Return whether the whole conversation fits the model's context."""
        prompt_tokens = len(self._prompt(item)) + sum(len(self.llm.tokenizer.encode(turn)) for turn in item.turns)
        turns = len(item.turns) + 1
        margin = 16 * len(item.turns)  # tokens that a chat template puts between messages
        return prompt_tokens + margin + turns * _max_tokens(item, settings) <= self.llm.assembly.requests.limits.context

    def prepare(self, item: BenchPrompt, temperature: float | None, settings: BenchSettings) -> list[MeasureJob]:
        self._plain.activate()
        prompt, params = self._prompt(item), params_for(item, temperature, settings)
        jobs = [MeasureJob(item.id, item.task, 0, tuple(prompt), params, item.prediction)]
        messages = list(item.messages)
        for turn, question in enumerate(item.turns, start=1):
            answer = self._answer(item, turn - 1, prompt, params.max_tokens or 1)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
            prompt = self.encode(messages)
            jobs.append(MeasureJob(item.id, item.task, turn, tuple(prompt), params))
        return jobs

    def generate(self, variant: Variant, job: MeasureJob) -> TimedOutput:
        slot, stats = self._slots[variant.name], self.llm.engine.stats
        slot.activate()
        self._warm(job)
        slot.drafter.take_drafts()
        draft_seconds = slot.drafter.seconds
        target_seconds = stats.target_seconds
        failures = stats.drafter_failures
        times = timed_generate(self.llm, [self._request(variant, each) for each in job.jobs])
        return TimedOutput(
            tokens=tuple(token for output in times.outputs for token in output),
            steps=times.steps,
            decode_seconds=times.decode_seconds,
            total_seconds=times.total_seconds,
            draft_seconds=slot.drafter.seconds - draft_seconds,
            target_seconds=stats.target_seconds - target_seconds,
            drafter_failures=stats.drafter_failures - failures,
            must_match=all(_must_match(state.speculation, job.params) for state in times.states),
            timed_tokens=times.timed_tokens,
            step_times=times.step_times,
            acceptance=AcceptanceByDepth.counted(slot.drafter.take_drafts()),
            origins=tuple(origin for state in times.states for origin in state.speculation.origins),
            lengths=tuple(map(len, times.outputs)),
        )

    def _warm(self, job: MeasureJob) -> None:
        """Prefill the prompts of a job, by the target and by the active heads.

        Each variant does it for itself: the engine drops all cached pages when it gets a drafter with a head, because
        they lack the head's KV.
        """
        prompts = [list(each.prompt) for each in job.jobs]
        self.llm.generate(prompts, SamplingParams(max_tokens=1), speculation=NO_SPECULATION)

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; a token that ends inside a character has its text in the next."""
        decoder = StreamDecoder(self.llm.tokenizer, skip_special=False)
        pieces = [decoder.push([token]) for token in tokens]
        return [*pieces[:-1], pieces[-1] + decoder.flush()] if pieces else []

    def _request(self, variant: Variant, job: MeasureJob) -> Request:
        choice = SpeculationChoice(prediction=job.prediction if variant.uses_prediction else None)
        choice = NO_SPECULATION if variant == PLAIN else choice
        (request,) = self.llm.assembly.requests.make(f"bench-{next(self._names)}", list(job.prompt), job.params, choice)
        return request

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Apply the chat template; without one, join the contents of the messages."""
        if self.llm.tokenizer.chat_template:
            return self.llm.tokenizer.encode_chat(messages)
        contents = [str(message.get("content") or "") for message in messages]
        return self.llm.tokenizer.encode("\n\n".join([*contents, ""]))

    def _prompt(self, item: BenchPrompt) -> list[int]:
        return self.encode(item.messages) if item.text is None else self.llm.tokenizer.encode(item.text)

    def _answer(self, item: BenchPrompt, turn: int, prompt: list[int], max_tokens: int) -> str:
        """Return the model's greedy answer before the next turn, the same for every variant and temperature."""
        key = (item.id, turn, max_tokens)
        if key not in self._answers:
            params = SamplingParams(max_tokens=max_tokens)
            (output,) = self.llm.generate([prompt], params, speculation=NO_SPECULATION)
            self._answers[key] = output.outputs[0].text
        return self._answers[key]


def params_for(item: BenchPrompt, temperature: float | None, settings: BenchSettings) -> SamplingParams:
    """Return the sampling parameters of a prompt: its own, else greedy, with a seed of its own."""
    sampling = {"seed": zlib.crc32(item.id.encode()), **item.sampling, "max_tokens": _max_tokens(item, settings)}
    if temperature is not None:
        sampling["temperature"] = temperature
    if item.schema is not None and settings.schemas:
        any_object = item.schema is True
        sampling["structured_outputs"] = (
            GrammarSpec.json_object() if any_object else GrammarSpec.json_schema(item.schema)
        )
    return SamplingParams(**sampling)


def _max_tokens(item: BenchPrompt, settings: BenchSettings) -> int:
    return item.max_tokens if settings.max_tokens is None else min(item.max_tokens, settings.max_tokens)


def _must_match(record: SpeculationStats, params: SamplingParams) -> bool:
    """Return whether the rule promises equal tokens: `match` always, the other lossless rules when greedy."""
    return record.rule == "match" or (record.lossless and params.temperature == 0)
