"""Engines around one sharded model: the processes start once, engines as often as needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from foretell.control.controller import FixedController
from foretell.draft import PlacedHead
from foretell.draft.base import Drafter, Wrapper
from foretell.draft.mix import MixDrafter
from foretell.draft.registry import head_drafter
from foretell.engine.engine import Engine
from foretell.engine.scheduler import Scheduler
from foretell.hub import open_checkpoint
from foretell.kv.prefix import PrefixIndex
from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import HeadConfig, TargetWeights, write_head
from foretell.models.draft_heads.loading import open_head, pack_head
from foretell.models.load import load_model
from foretell.models.sharding import Shard
from foretell.models.tied_weights import share_target_weights
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.model_runner import ModelRunner
from foretell.tensor_parallel import LaunchSpec, ModelShardSpec, TensorParallelGroup, make_leader
from foretell.types import DrafterTraits
from tests.tensor_parallel.sharding import write_folder
from tests.tiny import CONFIG, CONTEXT, PROMPTS, add, random_head, run, tiny_decoder

PAGES, PAGE_SIZE = 256, 4


class SplitHead(Wrapper):
    """A head sharded with the target; it is bound to an engine when that is created."""

    def __init__(self, name: str) -> None:
        super().__init__(MixDrafter([]))
        self.name = name
        self.traits = DrafterTraits(samples=True, gives_probability=True)

    def bind(self, runner: ModelRunner, placed: PlacedHead) -> None:
        self.wrap(head_drafter(runner, placed.head, placed.first, self.name))
        self.traits = replace(self.traits, hidden_layers=self.inner.traits.hidden_layers)


@dataclass(frozen=True)
class Split:
    """The leader's shard and the workers."""

    model: Decoder
    team: TensorParallelGroup
    heads: Mapping[str, PlacedHead]

    def engine(self, drafter: Drafter | None = None, pages: int = PAGES, nodes: int = 6, levels: int = 0) -> Engine:
        """Return a new engine; old KV in the workers' pages must not matter."""
        heads = [each.head for each in self.heads.values()]
        taps = tuple(sorted({tap for head in heads for tap in head.config.hidden_layers}))
        shapes = tuple(shape for head in heads for shape in head_layer_shapes(head.config, head.shard))
        runner = ModelRunner(self.model, pages, PAGE_SIZE, CONTEXT, taps, shapes)
        make_leader(runner, self.team)
        if isinstance(drafter, SplitHead):
            drafter.bind(runner, self.heads[drafter.name])
        scheduler = Scheduler(runner, PrefixIndex(runner.pool), 16, 64)
        return Engine(runner, drafter or MixDrafter([]), FixedController(nodes, levels), scheduler)

    def generate(
        self,
        drafter: Drafter | None = None,
        after_step: Callable[[Engine], None] = lambda engine: None,
        pages: int = PAGES,
        nodes: int = 6,
        levels: int = 0,
        **params: object,
    ) -> list[list[int]]:
        """Generate after each prompt, all in one batch."""
        engine = self.engine(drafter, pages, nodes, levels)
        tracks = [add(engine, str(i), prompt, **params)[0] for i, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]
        run(engine, after_step)
        assert engine.runner.pool.num_held == 0, "all pages are free"
        return [track.seq.tokens[len(track.seq.request.prompt) :] for track in tracks]


@contextmanager
def split(
    folder: Path,
    size: int,
    timeout: float = 60.0,
    device: str = "cpu",
    config: ModelConfig = CONFIG,
    heads: Mapping[str, HeadConfig] = MappingProxyType({}),
) -> Iterator[Split]:
    """Yield a tiny decoder and heads on `size` processes, this one included, all on one device."""
    whole = tiny_decoder(config=config)
    write_folder(whole, folder)
    for name, head in heads.items():
        write_head(random_head(head, TargetWeights.of(whole)), folder / name)
    folders = tuple(folder / name for name in heads)
    part = ModelShardSpec(folder, torch.float32, None, PAGES, PAGE_SIZE, CONTEXT, folders)
    orders = [LaunchSpec(Shard(rank, size), device, 1, (part,)) for rank in range(1, size)]
    team = TensorParallelGroup(orders, torch.device(device), timeout)
    try:
        model = load_model(open_checkpoint(folder), torch.float32, device, Shard(0, size))
        model.join_ranks(team.group)
        placed = place(model, folder, heads)
        team.wait_ready()
        yield Split(model, team, placed)
    finally:
        team.close()


def place(model: Decoder, folder: Path, heads: Mapping[str, HeadConfig]) -> dict[str, PlacedHead]:
    """Return the leader's shards of the heads in a folder."""
    lender, placed, first = (
        share_target_weights(open_checkpoint(folder), model),
        dict[str, PlacedHead](),
        model.config.layers,
    )
    opened = {name: open_head(folder / name, model.config) for name in heads}
    loaded = {name: each.load(lender, model.dtype, CONTEXT, model.shard) for name, each in opened.items()}
    model.prepare(CONTEXT)
    for name, head in loaded.items():
        pack_head(head, model)
        assert model.ranks is not None
        head.join_ranks(model.ranks)
        placed[name] = PlacedHead(head, first)
        first += len(head_layer_shapes(head.config, head.shard))
    return placed
