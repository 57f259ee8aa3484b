"""How a program is run: everything that is no argument of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretell.errors import RequestError

from .backend import Backend
from .branch import Manner
from .default import DEFAULT
from .run import MOST_GENERATIONS, Run
from .settings import NAMES, Settings
from .state import ProgramState

OPTIONS = ("backend", "stream", "max_generations", *NAMES)


@dataclass(frozen=True)
class Options:
    """The backend, the seed, and settings for generations that do not say otherwise."""

    backend: Backend
    defaults: Settings = Settings()
    seed: int | None = None
    stream: bool = False
    max_generations: int = MOST_GENERATIONS

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """From arguments by name."""
        settings = Settings.read({name: value for name, value in given.items() if name in NAMES})
        sampling = dict(settings.sampling)
        seed = sampling.pop("seed", None)
        most = given.get("max_generations", MOST_GENERATIONS)
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise RequestError("max_generations", f"must be 1 or more, not {most!r}")
        backend = given.get("backend") or DEFAULT.get()
        return cls(backend, replace(settings, sampling=sampling), seed, bool(given.get("stream")), most)

    def number(self, i: int) -> Options:
        """The same for run i of many: with a seed of its own."""
        if self.seed is None:
            return self
        from foretell.sampling.noise import derive_seed  # brings torch

        return replace(self, seed=derive_seed(self.seed, i))

    def begin(self) -> ProgramState:
        """The state of a new run."""
        run = Run(Manner(self.backend, self.defaults, self.stream), self.seed, self.max_generations)
        return ProgramState(run, run.root)
