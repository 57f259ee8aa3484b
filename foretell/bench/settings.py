"""The extent of a benchmark run. Imports little, because `--help` shows these defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foretell.errors import RequestError
from foretell.sampling_params import SamplingParams

from .prompt import BenchPrompt, RequestParams

if TYPE_CHECKING:
    from .http_client import Level


@dataclass(frozen=True)
class BenchSettings:
    """Prompts per task, output length, rounds and settings; None leaves a value to the workload."""

    per_task: int | None = None
    max_tokens: int | None = None  # upper bound for every prompt
    rounds: int = 3
    temperatures: tuple[float | None, ...] = (None,)  # None: that of the request, else greedy
    schemas: bool = True  # enforce the JSON schema of a prompt
    batches: tuple[int, ...] = (1,)  # batch sizes

    def __post_init__(self) -> None:
        for name in ("per_task", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(name, f"must be 1 or more, not {value}")
        for batch in self.batches:
            if batch < 1:
                raise RequestError("batch", f"must be 1 or more, not {batch}")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature or 0.0, max_tokens=self.max_tokens)

    def override(
        self,
        per_task: int | None = None,
        max_tokens: int | None = None,
        rounds: int | None = None,
        temperatures: tuple[float, ...] | None = None,
        batches: tuple[int, ...] | None = None,
    ) -> BenchSettings:
        """Return the settings with the values that a user gave."""
        return replace(
            self,
            per_task=self.per_task if per_task is None else per_task,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            rounds=self.rounds if rounds is None else rounds,
            temperatures=temperatures or self.temperatures,
            batches=batches or self.batches,
        )


OFFLINE = BenchSettings()
# Without schemas, because a grammar drafts too, and these compare drafters.
DRAFTERS = BenchSettings(per_task=5, max_tokens=64, temperatures=(0.0, 1.0), schemas=False)
# About a minute on two cores. Outputs are long enough for drafters to learn from, and two prompts give an interval.
QUICK_OFFLINE = replace(OFFLINE, per_task=2, max_tokens=128, rounds=1, temperatures=(0.0,))
QUICK_DRAFTERS = replace(DRAFTERS, per_task=1, max_tokens=48, rounds=2, temperatures=(0.0,))


@dataclass(frozen=True)
class CompareSettings:
    """Extent of `bench compare`. The first round is warm-up and dropped."""

    max_tokens: int = 128
    temperature: float | None = None  # None: that of each request, else 0
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("max_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")

    def request_params(self, item: BenchPrompt) -> RequestParams:
        own = float(item.sampling.get("temperature", 0.0))
        return RequestParams(
            min(item.max_tokens, self.max_tokens), own if self.temperature is None else self.temperature
        )


QUICK_COMPARE = CompareSettings(max_tokens=32, rounds=1)


@dataclass(frozen=True)
class LoadSettings:
    """Extent of `bench load`. The `seconds` of a load level are divided among the variants, each in `turns` slices."""

    levels: tuple[Level, ...]
    seconds: float = 120.0
    turns: int = 3
    max_tokens: int = 64
    temperature: float | None = None  # None: the server's default

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise RequestError("seconds", f"must be above 0, not {self.seconds}")
        for name in ("turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")
