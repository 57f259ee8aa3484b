"""Variants, timed outputs and the measuring loop of `bench offline`.

The variants of a run are interleaved, so that noise of the machine affects all of them alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol, TypeVar

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams

from .metrics import AcceptanceByDepth
from .prompt import BenchPrompt
from .settings import BenchSettings

T = TypeVar("T")

MIN_TOKENS = 16  # output tokens of each sequence in a batch, so that none finishes long before the others
ADAPTIVE = ("auto", "mix")  # drafters that choose the draft length themselves
NEED_A_MODEL = ("model", "eagle", "block", "medusa", "mtp", "assistant", "distilled")
NEED_FILES = ("corpus",)  # drafters of the files that an option names
ProgressCallback = Callable[[int, int, str], None]  # finished, total, what runs now


@dataclass(frozen=True)
class Variant:
    """One way to decode; the variants of a run differ in their speculation."""

    name: str
    speculation: SpeculationConfig

    @property
    def uses_prediction(self) -> bool:
        """Return whether the variant may draft from a request's predicted output."""
        return bool({"prediction", "auto", "mix"} & set(self.speculation.drafter.split(",")))

    def applies_to(self, job: MeasureJob) -> bool:
        """Return whether the variant can draft at all: `prediction` needs a predicted output."""
        return self.speculation.drafter != "prediction" or any(each.prediction is not None for each in job.jobs)


PLAIN = Variant("plain", SpeculationConfig(drafter="none"))


def variants_of(names: Sequence[str], nodes: Sequence[int], base: SpeculationConfig) -> list[Variant]:
    """Return a variant for each drafter and draft length; `a+b` is an adaptive mix of both."""
    variants: dict[str, Variant] = {}
    for name in names:
        if name in ("none", PLAIN.name):
            raise RequestError("drafters", f"{name} is what the others are compared with; leave it out")
        adapts = name in ADAPTIVE or "+" in name
        for count in (None,) if adapts else nodes:
            label = name if adapts or len(nodes) == 1 else f"{name}, {count} tokens"
            config = replace(base, drafter=name.replace("+", ","), num_speculative_tokens=count)
            variants[label] = Variant(label, config)
    return list(variants.values())


def variant_grid(names: Sequence[str], nodes: Sequence[int | None], base: SpeculationConfig) -> list[Variant]:
    """Return a variant for every drafter and draft length; a length of None is adaptive."""
    variants: list[Variant] = []
    for name, count in itertools.product(names, dict.fromkeys(nodes)):
        config = replace(base, drafter=name.replace("+", ","), num_speculative_tokens=count)
        if config.budget == 0 or name == PLAIN.name:
            raise RequestError("drafter", "is compared with plain decoding; name one that drafts")
        length = "adaptive" if count is None else f"{count} tokens"
        variants.append(Variant(name if len(nodes) == 1 else f"{name}, {length}", config))
    if not variants:
        raise RequestError("drafter", "is empty; name one that drafts")
    return variants


def default_drafters(kinds: Iterable[str], layers: int, items: Sequence[BenchPrompt]) -> list[str]:
    """Return every drafter that needs no other model and no files, with an argument that fits the model, then `auto`.

    `prediction` is left out if no prompt has a predicted output.
    """
    examples = {"exit": [f"exit:{max(1, layers // 2)}"], "self": ["self:int8", "self:int4"]}
    left_out = {*NEED_A_MODEL, *NEED_FILES}
    if all(item.prediction is None for item in items):
        left_out.add("prediction")
    return [name for kind in kinds if kind not in left_out for name in examples.get(kind, [kind])] + ["auto"]


@dataclass(frozen=True)
class MeasureJob:
    """A request that every variant runs, with the others of its batch."""

    prompt_id: str
    task: str
    turn: int
    prompt: tuple[int, ...]
    params: SamplingParams
    prediction: str | None = None
    others: tuple[MeasureJob, ...] = ()

    @property
    def jobs(self) -> tuple[MeasureJob, ...]:
        """Return all jobs of the batch, this one first."""
        return (self, *self.others)

    @property
    def batch_size(self) -> int:
        return 1 + len(self.others)


@dataclass(frozen=True)
class TimedOutput:
    """The output of a job with its wall-clock times in seconds; tokens of a batch are concatenated."""

    tokens: tuple[int, ...]
    steps: int
    decode_seconds: float  # from the first token, of the last sequence in a batch to have one, to the end
    total_seconds: float  # from submission to the end; parts of it:
    draft_seconds: float  # in the drafter
    target_seconds: float  # in the target's forward and verification
    drafter_failures: int = 0  # steps whose draft was lost because the drafter failed
    must_match: bool = True  # the rule promises the tokens of plain decoding
    timed_tokens: int | None = None  # tokens generated during `decode_seconds`; None: all but the first
    step_times: tuple[tuple[float, int], ...] = ()  # (seconds, new tokens) of each of those steps and sequences
    acceptance: AcceptanceByDepth = AcceptanceByDepth()
    origins: tuple[str, ...] = ()  # the drafter or target that proposed each token
    lengths: tuple[int, ...] = ()  # tokens of each sequence of a batch

    @property
    def seconds_per_token(self) -> float | None:
        """Return the decode time per token, without the first one, which belongs to prefill."""
        count = len(self.tokens) - 1 if self.timed_tokens is None else self.timed_tokens
        return self.decode_seconds / count if count > 0 and self.decode_seconds > 0 else None


@dataclass(frozen=True)
class Sample:
    """The output of one job by one variant in one round."""

    job: MeasureJob
    temperature: float | None
    round: int
    variant: str
    output: TimedOutput


class BenchBackend(Protocol):
    """A system under test that runs one job at a time."""

    def reset(self, variants: Sequence[Variant]) -> None:
        """Make every variant ready and warm, with no learned state."""

    def fits(self, item: BenchPrompt, settings: BenchSettings) -> bool:
        """Return whether a prompt and its output fit the model's context."""

    def prepare(self, item: BenchPrompt, temperature: float | None, settings: BenchSettings) -> list[MeasureJob]:
        """Return the jobs of a prompt, one per turn, and do everything that is not measured."""

    def generate(self, variant: Variant, job: MeasureJob) -> TimedOutput:
        """Run a job and time it."""

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token."""


def rotated(variants: Sequence[T], by: int) -> list[T]:
    """Rotate the order (A B C, B C A, C A B), so that no variant is always first or always after the same one."""
    by %= len(variants)
    return [*variants[by:], *variants[:by]]


def measure(
    backend: BenchBackend,
    variants: Sequence[Variant],
    items: Sequence[BenchPrompt],
    settings: BenchSettings,
    samples: list[Sample],
    progress: ProgressCallback,
) -> None:
    """Run everything and append to `samples`, so that a stopped run keeps what was finished.

    Variants start each pass over the prompts with no learned state: a drafter that remembers finished sequences would
    otherwise find in the second round what it saw in the first.
    """
    batches_by_size = {batch: make_batches(items, batch, settings) for batch in settings.batches}
    done, total = 0, settings.rounds * len(settings.temperatures) * sum(map(len, batches_by_size.values()))
    for number, temperature, size in itertools.product(range(settings.rounds), settings.temperatures, settings.batches):
        backend.reset(variants)
        for index, batch in enumerate(batches_by_size[size]):
            progress(done, total, f"{batch[0].task}, round {number + 1}")
            for job in merge_turns([backend.prepare(item, temperature, settings) for item in batch]):
                for variant in rotated([variant for variant in variants if variant.applies_to(job)], index + number):
                    samples.append(Sample(job, temperature, number, variant.name, backend.generate(variant, job)))
            done += 1
    progress(done, total, "done")


def make_batches(items: Sequence[BenchPrompt], batch: int, settings: BenchSettings) -> list[list[BenchPrompt]]:
    """Group the prompts of each task into batches; the last one is completed with rephrased prompts."""
    if batch == 1:
        return [[item] for item in items]
    found: list[list[BenchPrompt]] = []
    for task in dict.fromkeys(item.task for item in items):
        group = [item for item in items if item.task == task]
        count = -(-len(group) // batch) * batch
        padded = [with_min_tokens(item, settings) for item in variations(group, count)]
        found += [padded[i : i + batch] for i in range(0, count, batch)]
    return found


def merge_turns(prepared: Sequence[Sequence[MeasureJob]]) -> list[MeasureJob]:
    """Merge the jobs of a batch turn by turn into one job that holds the others."""
    turns = [[job for job in turn if job is not None] for turn in zip_longest(*prepared)]
    return [replace(first, others=tuple(others)) if others else first for first, *others in turns]


def variations(items: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """Return `count` distinct prompts; where there are fewer, they are repeated rephrased."""
    return [rephrase(items[i % len(items)], i // len(items)) for i in range(count)]


def rephrase(item: BenchPrompt, time: int) -> BenchPrompt:
    """Return a prompt with a number in its text that makes it differ; repetition 0 is the prompt itself."""
    if not time:
        return item
    name = f"{item.id}, again {time}"
    if item.text is not None:
        return replace(item, id=name, text=f"({time + 1})\n\n{item.text}")
    *before, last = item.messages
    last = {**last, "content": f"{last['content']}\n\n(Answer number {time + 1}.)"}
    return replace(item, id=name, messages=(*before, last))


def with_min_tokens(item: BenchPrompt, settings: BenchSettings) -> BenchPrompt:
    """Return the prompt with a minimum output length, so that it does not end before it can be timed."""
    shortest = min(MIN_TOKENS, item.max_tokens, settings.max_tokens or MIN_TOKENS)
    return replace(item, sampling={"min_tokens": shortest, **item.sampling})


Batch = tuple[MeasureJob, ...]


@dataclass(frozen=True)
class BatchResult:
    """The outputs of a batch with its decode time."""

    outputs: tuple[tuple[int, ...], ...]
    steps: int  # steps that gave a sequence a token, summed over sequences
    timed_tokens: int  # tokens generated while the clock ran
    seconds: float  # from when the last sequence had its first token to the end
    drafter_failures: int = 0  # steps whose draft was lost because the drafter failed

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def seconds_per_token(self) -> float:
        """Return the decode time per token over all sequences."""
        return self.seconds / self.timed_tokens


class BatchBackend(Protocol):
    """A system under test that runs batches."""

    def prepare(self, items: Sequence[BenchPrompt], temperature: float, batch: int, batches: int) -> list[Batch]:
        """Return the batches to run, and do everything that is not measured."""

    def reset(self, variants: Sequence[Variant]) -> None:
        """Make every variant ready for a round; the learned state of its controller stays."""

    def generate(self, variant: Variant, batch: Batch) -> BatchResult:
        """Run a batch and time it."""
