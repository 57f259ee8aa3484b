"""Engines around one model that is split over processes: the processes are started once, engines as often as wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from foretell.control.controller import FixedController
from foretell.draft.base import Drafter, NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.scheduler import Scheduler
from foretell.hub import open_checkpoint
from foretell.kv.prefix import PrefixIndex
from foretell.models.decoder import Decoder
from foretell.models.heads import Lender
from foretell.models.load import load_model
from foretell.models.shard import Shard
from foretell.parallel import Order, Part, Team, lead
from foretell.runner.runner import ModelRunner
from tests.parallel.splitting import write_folder
from tests.tiny import CONTEXT, PROMPTS, OwnHead, add, run, tiny_decoder

PAGES, PAGE_SIZE = 256, 4


@dataclass(frozen=True)
class Split:
    """The first rank's part, and the others."""

    model: Decoder
    team: Team

    def engine(self, drafter: Drafter | None = None, pages: int = PAGES, nodes: int = 6) -> Engine:
        """A fresh one; what lies in the other ranks' pages from the last one must not matter."""
        head = drafter if isinstance(drafter, OwnHead) else None
        beside = () if head is None else head.beside
        runner = ModelRunner(self.model, pages, PAGE_SIZE, CONTEXT, () if head is None else head.taps, beside)
        lead(runner, self.team)
        if head is not None:
            head.bind(runner, Lender.of(tiny_decoder().to(self.model.embed.device)), self.model.config.layers)
        scheduler = Scheduler(runner, PrefixIndex(runner.pool), 16, 64)
        return Engine(runner, drafter or NoDrafter(), FixedController(nodes), scheduler)

    def generate(
        self,
        drafter: Drafter | None = None,
        after_step: Callable[[Engine], None] = lambda engine: None,
        pages: int = PAGES,
        **params: object,
    ) -> list[list[int]]:
        """What is written after each prompt, all in one batch."""
        engine = self.engine(drafter, pages)
        tracks = [add(engine, str(i), prompt, **params)[0] for i, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]
        run(engine, after_step)
        assert engine.runner.pool.held == 0, "all pages are back"
        return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


@contextmanager
def split(folder: Path, size: int, patience: float = 60.0, device: str = "cpu") -> Iterator[Split]:
    """The tiny decoder on so many processes, this one included, all on one device."""
    write_folder(tiny_decoder(), folder)
    part = Part(folder, torch.float32, None, None, PAGES, PAGE_SIZE, CONTEXT)
    orders = [Order(Shard(rank, size), device, 1, (part,)) for rank in range(1, size)]
    team = Team(orders, torch.device(device), patience)
    try:
        model = load_model(open_checkpoint(folder), torch.float32, device, Shard(0, size))
        model.meet(team.group)
        team.wait()
        yield Split(model, team)
    finally:
        team.close()
