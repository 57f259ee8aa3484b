"""The same text, plain and by another arm, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .intervals import Estimate, over_prompts, over_rounds
from .measure import PLAIN, Sample, TimedOutput

Text = tuple[str, int]  # an item and its turn


@dataclass(frozen=True)
class Pair:
    """One text in one round."""

    text: Text
    plain: TimedOutput
    other: TimedOutput

    @property
    def ratio(self) -> float | None:
        """How many times faster than plain decoding; None for a text too short to be timed."""
        plain, other = self.plain.a_token, self.other.a_token
        return None if plain is None or other is None else plain / other

    @property
    def same(self) -> bool | None:
        """None where the rule promises the distribution and not the tokens."""
        return self.plain.tokens == self.other.tokens if self.other.promised else None


@dataclass
class Group:
    """The pairs of one task, temperature, batch size and arm."""

    task: str
    temperature: float | None
    batch: int
    arm: str
    pairs: list[Pair] = field(default_factory=list)

    @cached_property
    def ratios(self) -> list[list[float]]:
        """For each text its ratios, one a round."""
        found: dict[Text, list[float]] = {}
        for pair in self.pairs:
            if pair.ratio is not None:
                found.setdefault(pair.text, []).append(pair.ratio)
        return list(found.values())

    @cached_property
    def estimate(self) -> Estimate | None:
        """The ratio with prompts as random draws of the task; None with fewer than two prompts."""
        return over_prompts(self.ratios)

    @cached_property
    def round_estimate(self) -> Estimate | None:
        """The ratio for these prompts alone, with rounds as random; None with fewer than two rounds."""
        return over_rounds(self.ratios)

    @property
    def plain(self) -> list[TimedOutput]:
        return [pair.plain for pair in self.pairs]

    @property
    def others(self) -> list[TimedOutput]:
        return [pair.other for pair in self.pairs]


def grouped(samples: Sequence[Sample], arms: Sequence[str]) -> list[Group]:
    """Pairs by task, arm, temperature and batch size, arms in the order given.

    What has no plain partner, as in a run that was stopped, is left out.
    """
    plain = {_occasion(each): each.written for each in samples if each.arm == PLAIN.name}
    groups: dict[tuple[str, float | None, int, str], Group] = {}
    for each in samples:
        if each.arm == PLAIN.name or _occasion(each) not in plain:
            continue
        key = (each.job.task, each.temperature, each.job.batch, each.arm)
        pair = Pair((each.job.item, each.job.turn), plain[_occasion(each)], each.written)
        groups.setdefault(key, Group(*key)).pairs.append(pair)
    tasks = list(dict.fromkeys(group.task for group in groups.values()))
    return sorted(groups.values(), key=lambda group: (tasks.index(group.task), group.batch, arms.index(group.arm)))


def _occasion(sample: Sample) -> tuple[str, int, int, float | None, int]:
    return sample.job.item, sample.job.turn, sample.job.batch, sample.temperature, sample.round
