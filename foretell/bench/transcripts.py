"""What was asked and what was written, for whoever wants to read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from foretell.types import TARGET

from .measure import PLAIN, Sample, TimedOutput

Spell = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class Version:
    """A text as one arm wrote it: words with who proposed them."""

    arm: str
    runs: tuple[tuple[str, str], ...]
    tokens: int
    guessed: int  # of them, those that a drafter proposed
    same: bool | None = None  # as plain decoding; None where that is not promised

    @property
    def words(self) -> str:
        return "".join(words for _, words in self.runs)


@dataclass(frozen=True)
class TextRecord:
    """One text, by every arm; plain decoding comes first."""

    item: str
    task: str
    turn: int
    temperature: float | None
    prompt: str
    versions: tuple[Version, ...]


def records(samples: Sequence[Sample], spell: Spell) -> tuple[TextRecord, ...]:
    """The texts of the first round that every arm finished, the smallest batches alone: larger ones ask the same."""
    smallest = min((each.job.batch for each in samples), default=1)
    found: dict[tuple[str, int, float | None], list[Sample]] = {}
    for each in samples:
        if each.round == 0 and each.job.batch == smallest:
            found.setdefault((each.job.item, each.job.turn, each.temperature), []).append(each)
    whole = [group for group in found.values() if any(each.arm == PLAIN.name for each in group)]
    arms = list(dict.fromkeys((PLAIN.name, *(each.arm for each in samples))))
    return tuple(record for group in whole for record in _records(group, arms, spell))


def _records(group: Sequence[Sample], arms: Sequence[str], spell: Spell) -> list[TextRecord]:
    """One for each of the texts that were written side by side."""
    ranked = sorted(group, key=lambda each: arms.index(each.arm))
    plain = ranked[0].written
    found: list[TextRecord] = []
    for place, job in enumerate(ranked[0].job.all):
        versions = tuple(_version(each, place, plain, spell) for each in ranked)
        prompt = "".join(spell(job.prompt))
        found.append(TextRecord(job.item, job.task, job.turn, ranked[0].temperature, prompt, versions))
    return found


def _version(sample: Sample, place: int, plain: TimedOutput, spell: Spell) -> Version:
    tokens, origins = _part(sample.written, place)
    promised = sample.arm != PLAIN.name and sample.written.promised
    words = zip(origins, spell(tokens), strict=True)
    runs = tuple((who, "".join(word for _, word in run)) for who, run in groupby(words, key=lambda pair: pair[0]))
    guessed = sum(origin != TARGET for origin in origins)
    return Version(sample.arm, runs, len(tokens), guessed, tokens == _part(plain, place)[0] if promised else None)


def _part(written: TimedOutput, place: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tokens of one of several texts, and who proposed them."""
    lengths = written.lengths or (len(written.tokens),)
    start = sum(lengths[:place])
    end = start + lengths[place]
    origins = written.origins or (TARGET,) * len(written.tokens)
    return written.tokens[start:end], origins[start:end]
