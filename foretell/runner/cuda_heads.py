"""All steps of a head's draft as one graph: what is guessed feeds the next step on the device; the host waits once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretell.models.heads import DistilledHead, EagleHead, MtpHead
from foretell.models.heads.layer import Turn

from .head_memory import Glance, HeadMemory
from .head_tables import BEFORE, PLACE, TOKEN, WIDE, HeadSizes, HeadTable, HeadText, sizes_of
from .native_head import Told
from .recording import Recorder

SteppingHead = EagleHead | MtpHead | DistilledHead
SECOND = 2  # of what comes back of a tree: the children's tokens, their shares, and which of them were followed


@dataclass(frozen=True)
class Grown:
    """What was looked at of some trees, by depth and text: for each followed node its likeliest children."""

    tokens: npt.NDArray[np.int64]  # [depth, texts, followed, children]
    shares: npt.NDArray[np.float32]  # how likely each is there
    followed: npt.NDArray[np.int64]  # [depth, texts, followed]: which children the next depth's are, all counted through


class WholeSteps:
    """Of heads that guess one token after another. Its computation is plain torch over memory of fixed size, the same
    on every device; on a CUDA device it is recorded."""

    def __init__(
        self, head: SteppingHead, keys: list[Tensor], values: list[Tensor], features: Tensor, most_children: int
    ) -> None:
        """`features` [pages, page_size, 1, width] are what the head keeps of each place beside its keys and values."""
        self.head, self.keys, self.values = head, keys, values
        self.features = features.view(-1, features.shape[-1])
        self.children = min(most_children, head.config.outputs)
        self.page_size, self.last = keys[0].shape[1], len(head.table) - 1
        self.tables: dict[HeadSizes, HeadTable] = {}
        self.recorder: Recorder[HeadSizes] = Recorder(features.device)

    def chain(self, texts: list[HeadText], depth: int) -> Told:
        """The likeliest token, again and again."""
        sizes = sizes_of(texts, depth)
        self._table(sizes).send(texts)
        found = self.recorder(sizes, lambda: self.run_chain(sizes))
        tokens, sure = found[:, :, : len(texts)].tolist()  # waits, so the tables may be written again
        return Told([[int(token) for token in level] for level in tokens], sure)

    def tree(self, texts: list[HeadText], depth: int) -> Grown:
        """The likeliest branches of each, as many as its text wants followed."""
        sizes = sizes_of(texts, depth, self.children)
        self._table(sizes).send(texts)
        found = self.recorder(sizes, lambda: self.run_tree(sizes)).cpu().numpy()
        tokens, shares, followed = found[:, 0], found[:, 1], found[:, SECOND, :, :, 0]
        return Grown(tokens.astype(np.int64), shares, followed.astype(np.int64))

    def _table(self, sizes: HeadSizes) -> HeadTable:
        if sizes not in self.tables:
            self.tables[sizes] = HeadTable(sizes, self.page_size, self.features.device)
        return self.tables[sizes]

    def run_chain(self, sizes: HeadSizes) -> Tensor:
        """[tokens and how sure, depth, texts], in float32."""
        table = self.tables[sizes]
        memory, columns = self._memory(table), self._columns(table)
        bias = memory.bias(self._chain_seen(memory, table))
        tokens, feature = table.field(TOKEN), self.features.index_select(0, table.field(BEFORE))
        found = torch.empty(2, sizes.depth, sizes.texts, device=bias.device)
        for offset in range(sizes.depth):
            glance = Glance(memory, bias[:, offset : offset + 1], columns + offset)
            states = self.head.step(tokens, feature, self._turn(table, offset), glance)
            logits = self.head.logits(states)
            best, at = logits.max(-1)
            tokens, feature = self.head.draft_ids[at], self.head.carry(states)
            found[0, offset] = tokens
            found[1, offset] = (best - logits.logsumexp(-1)).exp()
        return found

    def run_tree(self, sizes: HeadSizes) -> Tensor:
        """[depth, what is told (see `Grown`), texts, followed, children], in float32."""
        table, wide = self.tables[sizes], sizes.wide
        found = torch.zeros(sizes.depth, 3, sizes.texts, wide, self.children, device=self.features.device)
        level = Level(self._memory(table), table, self._columns(table), found, self.head.draft_ids)
        feature = self.features.index_select(0, table.field(BEFORE))
        states = self._step(level, table.field(TOKEN), feature, self._turn(table, 0))
        for depth in range(1, sizes.depth):
            tokens, before = level.descend(depth)
            states = self._step(level, tokens, states.index_select(0, before), self._turn(table, depth, wide))
        return found

    def _step(self, level: Level, tokens: Tensor, feature: Tensor, turn: Turn) -> Tensor:
        """The features behind a level's rows."""
        states = self.head.step(tokens, feature, turn, level.glance())
        level.look(self.head.logits(states))
        return self.head.carry(states)

    def _memory(self, table: HeadTable) -> HeadMemory:
        return HeadMemory(self.keys, self.values, self.head.config.layer, table.pages)

    def _columns(self, table: HeadTable) -> int:
        """Of text; those behind are for guesses."""
        return table.shown * self.page_size

    def _turn(self, table: HeadTable, offset: int, rows: int = 1) -> Turn:
        """Of as many rows for each text; one that is guessed for less far than others may come to its end before."""
        places = (table.field(PLACE) + offset).clamp_max(self.last)
        return self.head.turn(places[:, None].expand(-1, rows).flatten())

    def _chain_seen(self, memory: HeadMemory, table: HeadTable) -> Tensor:
        """What the rows of all steps see, [texts, depth, columns]."""
        depths = torch.arange(table.sizes.depth, device=self.features.device)
        text = memory.of_text(table.field(PLACE), self._columns(table), depths, hidden=1)
        behind = memory.keys[0].shape[1] - self._columns(table)
        own = memory.near(depths, torch.arange(behind, device=depths.device))
        return torch.cat([text, own.expand(len(text), -1, -1)], -1)


class Level:
    """The nodes of some trees whose children are looked at next: at first the texts' last tokens, then in each text as
    many as are followed."""

    def __init__(self, memory: HeadMemory, table: HeadTable, columns: int, found: Tensor, ids: Tensor) -> None:
        self.memory, self.table, self.columns, self.found, self.ids = memory, table, columns, found, ids
        texts, device = table.sizes.texts, found.device
        self.depth, self.rows, self.first = 0, 1, 0
        self.chances = torch.ones(texts, 1, dtype=torch.float64, device=device)  # as the host multiplies shares
        behind = memory.keys[0].shape[1] - columns
        self.guess = torch.arange(behind, device=device)
        self.depth_of = (self.guess + table.sizes.wide - 1) // table.sizes.wide  # the root alone, then levels
        self.way = (self.guess == 0).expand(texts, 1, -1)  # guesses on the way to each row, itself the last
        self.tokens = torch.zeros(texts, 1, dtype=torch.int64, device=device)  # of all children, and what they are worth
        self.worth = self.chances

    def glance(self) -> Glance:
        """What the level's rows see."""
        depths = torch.full((self.rows,), self.depth, device=self.found.device)
        text = self.memory.of_text(self.table.field(PLACE), self.columns, depths, hidden=1)
        seen = torch.cat([text, self.way & self.memory.near(depths, self.depth_of)], -1)
        return Glance(self.memory, self.memory.bias(seen), self.columns + self.first)

    def look(self, logits: Tensor) -> None:
        """Note the likeliest children of each row of logits [texts * rows, outputs]."""
        texts, count = self.table.sizes.texts, self.found.shape[-1]
        best, at = logits.topk(count)
        shares = (best - logits.logsumexp(-1, keepdim=True)).exp().view(texts, self.rows, count)
        tokens = self.ids[at].view(texts, self.rows, count)
        self.found[self.depth, 0, :, : self.rows] = tokens
        self.found[self.depth, 1, :, : self.rows] = shares
        self.tokens, self.worth = tokens.flatten(1), (self.chances[..., None] * shares).flatten(1)

    def descend(self, depth: int) -> tuple[Tensor, Tensor]:
        """Follow the best of all children; of these the tokens, and which row of the last level each hangs on."""
        (texts, wide), count = (self.table.sizes.texts, self.table.sizes.wide), self.found.shape[-1]
        # Of equals the first, as on the host: so it is a sort that leaves them in order.
        worth, order = self.worth.sort(dim=1, descending=True, stable=True)
        chosen = order[:, :wide]
        self.found[self.depth, SECOND, :, :, 0] = chosen
        rank = torch.arange(wide, device=chosen.device)
        # What is beyond a text's own width is not followed there, and must not crowd out what hangs on the others.
        self.chances = worth[:, :wide].masked_fill(rank >= self.table.field(WIDE)[:, None], 0)
        parent = chosen // count
        before = parent + torch.arange(texts, device=chosen.device)[:, None] * self.rows
        self.depth, self.rows, self.first = depth, wide, 1 + (depth - 1) * wide
        ways = self.way.gather(1, parent[..., None].expand(-1, -1, self.way.shape[-1]))
        self.way = ways | (self.guess == self.first + rank[:, None])
        return self.tokens.gather(1, chosen).flatten(), before.flatten()
