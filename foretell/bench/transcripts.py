"""Transcripts: prompts with the output of each variant, marked by the drafter that proposed each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from foretell.types import TARGET

from .measure import PLAIN, Sample, TimedOutput

Decode = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class TranscriptVersion:
    """The output of one variant as runs of (origin, text)."""

    variant: str
    runs: tuple[tuple[str, str], ...]
    tokens: int
    drafted: int  # tokens that a drafter proposed
    same: bool | None = None  # equal to plain decoding; None where that is not promised

    @property
    def text(self) -> str:
        return "".join(words for _, words in self.runs)


@dataclass(frozen=True)
class Transcript:
    """One prompt with the output of every variant, plain decoding first."""

    prompt_id: str
    task: str
    turn: int
    temperature: float | None
    prompt: str
    versions: tuple[TranscriptVersion, ...]


def transcripts_of(samples: Sequence[Sample], decode: Decode) -> tuple[Transcript, ...]:
    """Return the transcripts of the first round at the smallest batch size; larger batches have the same prompts."""
    smallest = min((each.job.batch_size for each in samples), default=1)
    found: dict[tuple[str, int, float | None], list[Sample]] = {}
    for each in samples:
        if each.round == 0 and each.job.batch_size == smallest:
            found.setdefault((each.job.prompt_id, each.job.turn, each.temperature), []).append(each)
    complete = [group for group in found.values() if any(each.variant == PLAIN.name for each in group)]
    variants = list(dict.fromkeys((PLAIN.name, *(each.variant for each in samples))))
    return tuple(record for group in complete for record in _records(group, variants, decode))


def _records(group: Sequence[Sample], variants: Sequence[str], decode: Decode) -> list[Transcript]:
    """Return one transcript for each sequence of a batch."""
    ranked = sorted(group, key=lambda each: variants.index(each.variant))
    plain = ranked[0].output
    found: list[Transcript] = []
    for index, job in enumerate(ranked[0].job.jobs):
        versions = tuple(_version(each, index, plain, decode) for each in ranked)
        prompt = "".join(decode(job.prompt))
        found.append(Transcript(job.prompt_id, job.task, job.turn, ranked[0].temperature, prompt, versions))
    return found


def _version(sample: Sample, index: int, plain: TimedOutput, decode: Decode) -> TranscriptVersion:
    tokens, origins = _part(sample.output, index)
    must_match = sample.variant != PLAIN.name and sample.output.must_match
    pieces = zip(origins, decode(tokens), strict=True)
    runs = tuple(
        (origin, "".join(text for _, text in run)) for origin, run in groupby(pieces, key=lambda pair: pair[0])
    )
    drafted = sum(origin != TARGET for origin in origins)
    same = tokens == _part(plain, index)[0] if must_match else None
    return TranscriptVersion(sample.variant, runs, tokens=len(tokens), drafted=drafted, same=same)


def _part(output: TimedOutput, index: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the tokens of one sequence of a batch, and the origin of each."""
    lengths = output.lengths or (len(output.tokens),)
    start = sum(lengths[:index])
    end = start + lengths[index]
    origins = output.origins or (TARGET,) * len(output.tokens)
    return output.tokens[start:end], origins[start:end]
