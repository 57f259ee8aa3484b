"""All steps of a head's draft as one graph: what is guessed feeds the next step on the device; the host waits once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from foretell.models.draft_heads import DistilledHead, EagleHead, MtpHead
from foretell.models.draft_heads.layer import RopeRows
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.heads.kv import Glance, HeadMemory
from foretell.runner.heads.sampler import DraftOutput, ExponentialRace, ProbsBuffer, TreeCandidates, TreeTopK, pick
from foretell.runner.heads.tables import BEFORE, PLACE, TOKEN, DraftRow, DraftShape, DraftTable, sizes_of


class ReadbackGraphCache(GraphCache[DraftShape, DraftOutput]):
    """What is told lies on the host, good until the next call; the work is over, so tables may be written again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._rooms: dict[DraftShape, Tensor] = {}  # pinned: a device writes there while the host does something else

    def __call__(self, sizes: DraftShape, run: Callable[[], DraftOutput], keep: bool = True) -> DraftOutput:
        if self.device.type != "cuda":
            return super().__call__(sizes, run, keep)
        found = super().__call__(sizes, lambda: self._sent(sizes, run()), keep)
        torch.cuda.current_stream(self.device).synchronize()
        return found

    def _sent(self, sizes: DraftShape, found: DraftOutput) -> DraftOutput:
        """On its way. Work is run plainly before it is recorded, so no memory is taken in a recording."""
        if sizes not in self._rooms:
            self._rooms[sizes] = torch.empty(found.told.shape, dtype=found.told.dtype, pin_memory=True)
        return replace(found, told=self._rooms[sizes].copy_(found.told, non_blocking=True))


SteppingHead = EagleHead | MtpHead | DistilledHead


class GraphDraft:
    """Of heads that guess one token after another. Its computation is plain torch over memory of fixed size, the same
    on every device; on a CUDA device it is recorded."""

    def __init__(
        self, head: SteppingHead, keys: list[Tensor], values: list[Tensor], features: Tensor | None, most_children: int
    ) -> None:
        """`features` [pages, page_size, 1, width] are what the head keeps of each place beside its keys and values;
        None: it looks at tokens alone."""
        self.head, self.keys, self.values, self.device = head, keys, values, keys[0].device
        self.features = None if features is None else features.view(-1, features.shape[-1])
        self.children = min(most_children, head.config.outputs)
        self.page_size = keys[0].shape[1]
        self.tables: dict[DraftShape, DraftTable] = {}
        self.room = ProbsBuffer(head.config.outputs, self.device)
        self.recorder: GraphCache[DraftShape, DraftOutput] = ReadbackGraphCache(self.device)

    def chain(self, texts: list[DraftRow], depth: int) -> DraftOutput:
        """For each text a token, again and again: the likeliest, or the one that wins its race."""
        sizes = self.recorder.serving(sizes_of(texts, depth))
        self._table(sizes).send(texts)
        probs = self.room(sizes)
        return self.recorder(sizes, lambda: self.run_chain(sizes, probs), sizes.is_small).of(len(texts))

    def tree(self, texts: list[DraftRow], depth: int) -> TreeCandidates:
        """The likeliest branches of each, as many as its text wants followed."""
        sizes = self.recorder.serving(sizes_of(texts, depth, self.children))
        self._table(sizes).send(texts)
        return TreeCandidates.told(self.recorder(sizes, lambda: self.run_tree(sizes), sizes.is_small).told)

    def _table(self, sizes: DraftShape) -> DraftTable:
        if sizes not in self.tables:
            guesses = 1 + (sizes.depth - 1) * max(1, sizes.wide)
            self.tables[sizes] = DraftTable(sizes, guesses, self.page_size, self.device)
        return self.tables[sizes]

    def run_chain(self, sizes: DraftShape, probs: Tensor | None) -> DraftOutput:
        """Leaves in `probs` what was drawn from."""
        table = self.tables[sizes]
        memory, race = self._memory(table), ExponentialRace(table, self.head.draft_ids)
        bias = memory.bias(self._chain_seen(memory, table))
        tokens, feature = table.field(TOKEN), self._before(table)
        found = DraftOutput(torch.empty(2, sizes.depth, sizes.texts, device=table.device), probs)
        for offset in range(sizes.depth):
            glance = Glance(memory, bias[:, offset : offset + 1], table.columns + offset)
            states = self.head.step(tokens, feature, self._turn(table, offset), glance)
            tokens, feature = pick(self.head.logits(states), race, found, offset), self.head.carry(states)
        return found

    def run_tree(self, sizes: DraftShape) -> DraftOutput:
        table, wide = self.tables[sizes], sizes.wide
        choice = TreeTopK(table, self.head.draft_ids, self.children)
        ways = Ways(self._memory(table), table)
        states = self.head.step(table.field(TOKEN), self._before(table), self._turn(table, 0), ways.glance())
        choice.look(self.head.logits(states))
        for depth in range(1, sizes.depth):
            feature = self.head.carry(states)
            tokens, parents = choice.descend()
            before = parents + torch.arange(sizes.texts, device=parents.device)[:, None] * ways.rows
            ways.descend(parents)
            turn = self._turn(table, depth, wide)
            states = self.head.step(tokens, feature.index_select(0, before.flatten()), turn, ways.glance())
            choice.look(self.head.logits(states))
        return DraftOutput(choice.found)

    def _before(self, table: DraftTable) -> Tensor:
        """The features of the places before the last, [texts, width]."""
        if self.features is None:
            return self.head.like.new_zeros(table.sizes.texts, self.head.config.layer.width)
        return self.features.index_select(0, table.field(BEFORE))

    def _memory(self, table: DraftTable) -> HeadMemory:
        return HeadMemory(self.keys, self.values, self.head.config.layer, table.pages)

    def _turn(self, table: DraftTable, offset: int, rows: int = 1) -> RopeRows:
        """Of as many rows for each text."""
        places = table.field(PLACE) + offset
        return self.head.rope_rows_clamped(places[:, None].expand(-1, rows).flatten())

    def _chain_seen(self, memory: HeadMemory, table: DraftTable) -> Tensor:
        """What the rows of all steps see, [texts, depth, columns]."""
        depths = torch.arange(table.sizes.depth, device=self.device)
        text = memory.of_text(table.field(PLACE), table.columns, depths, hidden=1)
        own = memory.near(depths, torch.arange(memory.columns - table.columns, device=depths.device))
        return torch.cat([text, own.expand(len(text), -1, -1)], -1)


class Ways:
    """Guesses on the way to each row of a level: at first the texts' last tokens, then as many in each text as are
    followed. They stand in columns behind the text, the root's first."""

    def __init__(self, memory: HeadMemory, table: DraftTable) -> None:
        self.memory, self.table = memory, table
        self.depth, self.rows, self.first = 0, 1, 0
        self.guess = torch.arange(memory.columns - table.columns, device=table.device)
        self.depth_of = (self.guess + table.sizes.wide - 1) // table.sizes.wide
        self.way = (self.guess == 0).expand(table.sizes.texts, 1, -1)  # [texts, rows, guesses], itself the last

    def glance(self) -> Glance:
        """What the level's rows see."""
        depths = torch.full((self.rows,), self.depth, device=self.guess.device)
        text = self.memory.of_text(self.table.field(PLACE), self.table.columns, depths, hidden=1)
        seen = torch.cat([text, self.way & self.memory.near(depths, self.depth_of)], -1)
        return Glance(self.memory, self.memory.bias(seen), self.table.columns + self.first)

    def descend(self, parents: Tensor) -> None:
        """To the next level, whose rows hang on these of the last one, [texts, followed]."""
        wide = parents.shape[1]
        self.depth, self.rows, self.first = self.depth + 1, wide, 1 + self.depth * wide
        ways = self.way.gather(1, parents[..., None].expand(-1, -1, self.way.shape[-1]))
        self.way = ways | (self.guess == self.first + torch.arange(wide, device=parents.device)[:, None])
