"""All steps of a head's draft as one graph: what is guessed feeds the next step on the device; the host waits once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from foretell.models.draft_heads import BlockHead, DistilledHead, EagleHead, MedusaHead, MtpHead
from foretell.models.draft_heads.layer import RopeRows
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.heads.kv import GraphAttention, GraphKV
from foretell.runner.heads.sampler import (
    DraftOutput,
    ExponentialRace,
    ProbsBuffer,
    TreeCandidates,
    TreeTopK,
    sample_tokens,
)
from foretell.runner.heads.tables import POSITION, PREVIOUS_SLOT, TOKEN, DraftRow, DraftShape, DraftTable, draft_shape


class ReadbackGraphCache(GraphCache[DraftShape, DraftOutput]):
    """What is told lies on the host, good until the next call; the work is over, so tables may be written again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffers: dict[DraftShape, Tensor] = {}  # pinned: a device writes there while the host does something else

    def __call__(self, sizes: DraftShape, run: Callable[[], DraftOutput], keep: bool = True) -> DraftOutput:
        if self.device.type != "cuda":
            return super().__call__(sizes, run, keep)
        found = super().__call__(sizes, lambda: self._copy_to_host(sizes, run()), keep)
        torch.cuda.current_stream(self.device).synchronize()
        return found

    def _copy_to_host(self, sizes: DraftShape, found: DraftOutput) -> DraftOutput:
        """On its way. Work is run plainly before it is recorded, so no memory is taken in a recording."""
        if sizes not in self._buffers:
            self._buffers[sizes] = torch.empty(found.readback.shape, dtype=found.readback.dtype, pin_memory=True)
        return replace(found, readback=self._buffers[sizes].copy_(found.readback, non_blocking=True))


AutoregressiveHead = EagleHead | MtpHead | DistilledHead


class GraphDraft:
    """Of heads that guess one token after another. Its computation is plain torch over memory of fixed size, the same
    on every device; on a CUDA device it is recorded."""

    def __init__(
        self,
        head: AutoregressiveHead,
        keys: list[Tensor],
        values: list[Tensor],
        features: Tensor | None,
        most_children: int,
    ) -> None:
        """`features` [pages, page_size, 1, width] are what the head keeps of each place beside its keys and values;
        None: it looks at tokens alone."""
        self.head, self.keys, self.values, self.device = head, keys, values, keys[0].device
        self.state_cache = None if features is None else features.view(-1, features.shape[-1])
        self.max_children = min(most_children, head.config.outputs)
        self.page_size = keys[0].shape[1]
        self.tables: dict[DraftShape, DraftTable] = {}
        self.probs_buffer = ProbsBuffer(head.config.outputs, self.device)
        self.graphs: GraphCache[DraftShape, DraftOutput] = ReadbackGraphCache(self.device)

    def chain(self, texts: list[DraftRow], depth: int) -> DraftOutput:
        """For each text a token, again and again: the likeliest, or the one that wins its race."""
        sizes = self.graphs.select(draft_shape(texts, depth))
        self._table(sizes).upload(texts)
        probs = self.probs_buffer(sizes)
        return self.graphs(sizes, lambda: self.run_chain(sizes, probs), sizes.is_small).unpadded(len(texts))

    def tree(self, texts: list[DraftRow], depth: int) -> TreeCandidates:
        """The likeliest branches of each, as many as its text wants followed."""
        sizes = self.graphs.select(draft_shape(texts, depth, self.max_children))
        self._table(sizes).upload(texts)
        return TreeCandidates.from_readback(self.graphs(sizes, lambda: self.run_tree(sizes), sizes.is_small).readback)

    def _table(self, sizes: DraftShape) -> DraftTable:
        if sizes not in self.tables:
            guesses = 1 + (sizes.depth - 1) * max(1, sizes.width)
            self.tables[sizes] = DraftTable(sizes, guesses, self.page_size, self.device)
        return self.tables[sizes]

    def run_chain(self, sizes: DraftShape, probs: Tensor | None) -> DraftOutput:
        """Leaves in `probs` what was drawn from."""
        table = self.tables[sizes]
        memory, race = self._gather_kv(table), ExponentialRace(table, self.head.draft_ids)
        bias = memory.mask_bias(self._chain_mask(memory, table))
        tokens, feature = table.field(TOKEN), self._previous_states(table)
        found = DraftOutput(torch.empty(2, sizes.depth, sizes.sequences, device=table.device), probs)
        for offset in range(sizes.depth):
            glance = GraphAttention(memory, bias[:, offset : offset + 1], table.columns + offset)
            states = self.head.step(tokens, feature, self._rope(table, offset), glance)
            tokens, feature = sample_tokens(self.head.logits(states), race, found, offset), self.head.carry(states)
        return found

    def run_tree(self, sizes: DraftShape) -> DraftOutput:
        table, wide = self.tables[sizes], sizes.width
        choice = TreeTopK(table, self.head.draft_ids, self.max_children)
        ways = TreeMask(self._gather_kv(table), table)
        states = self.head.step(
            table.field(TOKEN), self._previous_states(table), self._rope(table, 0), ways.attention()
        )
        choice.add_level(self.head.logits(states))
        for depth in range(1, sizes.depth):
            feature = self.head.carry(states)
            tokens, parents = choice.expand()
            before = parents + torch.arange(sizes.sequences, device=parents.device)[:, None] * ways.rows
            ways.expand(parents)
            turn = self._rope(table, depth, wide)
            states = self.head.step(tokens, feature.index_select(0, before.flatten()), turn, ways.attention())
            choice.add_level(self.head.logits(states))
        return DraftOutput(choice.output)

    def _previous_states(self, table: DraftTable) -> Tensor:
        """The features of the places before the last, [texts, width]."""
        if self.state_cache is None:
            return self.head.like.new_zeros(table.shape.sequences, self.head.config.layer.width)
        return self.state_cache.index_select(0, table.field(PREVIOUS_SLOT))

    def _gather_kv(self, table: DraftTable) -> GraphKV:
        return GraphKV(self.keys, self.values, self.head.config.layer, table.pages)

    def _rope(self, table: DraftTable, offset: int, rows: int = 1) -> RopeRows:
        """Of as many rows for each text."""
        places = table.field(POSITION) + offset
        return self.head.rope_rows_clamped(places[:, None].expand(-1, rows).flatten())

    def _chain_mask(self, memory: GraphKV, table: DraftTable) -> Tensor:
        """What the rows of all steps see, [texts, depth, columns]."""
        depths = torch.arange(table.shape.depth, device=self.device)
        text = memory.context_mask(table.field(POSITION), table.columns, depths, first_position=1)
        own = memory.window_mask(depths, torch.arange(memory.columns - table.columns, device=depths.device))
        return torch.cat([text, own.expand(len(text), -1, -1)], -1)


class TreeMask:
    """Guesses on the way to each row of a level: at first the texts' last tokens, then as many in each text as are
    followed. They stand in columns behind the text, the root's first."""

    def __init__(self, memory: GraphKV, table: DraftTable) -> None:
        self.kv, self.table = memory, table
        self.depth, self.rows, self.first = 0, 1, 0
        self.draft_column = torch.arange(memory.columns - table.columns, device=table.device)
        self.column_depth = (self.draft_column + table.shape.width - 1) // table.shape.width
        self.mask = (self.draft_column == 0).expand(
            table.shape.sequences, 1, -1
        )  # [texts, rows, guesses], itself the last

    def attention(self) -> GraphAttention:
        """What the level's rows see."""
        depths = torch.full((self.rows,), self.depth, device=self.draft_column.device)
        text = self.kv.context_mask(self.table.field(POSITION), self.table.columns, depths, first_position=1)
        seen = torch.cat([text, self.mask & self.kv.window_mask(depths, self.column_depth)], -1)
        return GraphAttention(self.kv, self.kv.mask_bias(seen), self.table.columns + self.first)

    def expand(self, parents: Tensor) -> None:
        """To the next level, whose rows hang on these of the last one, [texts, followed]."""
        wide = parents.shape[1]
        self.depth, self.rows, self.first = self.depth + 1, wide, 1 + self.depth * wide
        ways = self.mask.gather(1, parents[..., None].expand(-1, -1, self.mask.shape[-1]))
        self.mask = ways | (self.draft_column == self.first + torch.arange(wide, device=parents.device)[:, None])


ParallelHead = TypeVar("ParallelHead", BlockHead, MedusaHead)


class GraphForward(ABC, Generic[ParallelHead]):
    """What both have in common: logits of all places are there before the first token is."""

    draft_rows = 0  # rows of a pass that stand behind a text

    def __init__(self, head: ParallelHead, page_size: int, device: torch.device, most_children: int) -> None:
        self.head: ParallelHead = head
        self.page_size, self.device = page_size, device
        self.max_children = min(most_children, head.config.outputs)
        self.tables: dict[DraftShape, DraftTable] = {}
        self.probs_buffer = ProbsBuffer(head.config.outputs, device)
        self.graphs: GraphCache[DraftShape, DraftOutput] = ReadbackGraphCache(device)

    def chain(self, texts: list[DraftRow], depth: int) -> DraftOutput:
        """For each text a token at each place: the likeliest, or the one that wins its race."""
        sizes = self._upload(texts, draft_shape(texts, depth))
        probs = self.probs_buffer(sizes)
        return self.graphs(sizes, lambda: self.run_chain(sizes, probs), sizes.is_small).unpadded(len(texts))

    def tree(self, texts: list[DraftRow], depth: int) -> TreeCandidates:
        """The likeliest children of each place; with a Markov head, of each node that is followed there."""
        sizes = self._upload(texts, draft_shape(texts, depth, self.max_children if self.depends_on_tokens else 1))
        return TreeCandidates.from_readback(self.graphs(sizes, lambda: self.run_tree(sizes), sizes.is_small).readback)

    @property
    def depends_on_tokens(self) -> bool:
        """Whether what may come at a place hangs on the token before it."""
        return False

    def _upload(self, texts: list[DraftRow], wanted: DraftShape) -> DraftShape:
        sizes = self.graphs.select(wanted)
        if sizes not in self.tables:
            self.tables[sizes] = DraftTable(sizes, self.draft_rows, self.page_size, self.device)
        self.tables[sizes].upload(texts)
        return sizes

    def run_chain(self, sizes: DraftShape, probs: Tensor | None) -> DraftOutput:
        """Leaves in `probs` what was drawn from."""
        table = self.tables[sizes]
        states, scores = self.forward(table)
        race, tokens = ExponentialRace(table, self.head.draft_ids), table.field(TOKEN)
        found = DraftOutput(torch.empty(2, sizes.depth, sizes.sequences, device=table.device), probs)
        for offset in range(sizes.depth):
            before, tokens = tokens, sample_tokens(self.add_markov_bias(scores[:, offset], tokens), race, found, offset)
            self.write_confidence(states[:, offset], before, found.readback[1, offset])
        return found

    def run_tree(self, sizes: DraftShape) -> DraftOutput:
        table = self.tables[sizes]
        _, scores = self.forward(table)
        choice, tokens, rows = TreeTopK(table, self.head.draft_ids, self.max_children), table.field(TOKEN), 1
        for depth in range(sizes.depth):
            if depth and self.depends_on_tokens:
                (tokens, _), rows = choice.expand(), sizes.width
            elif depth:
                choice.depth += 1
            level = scores[:, depth, None].expand(-1, rows, -1).flatten(0, 1)
            choice.add_level(self.add_markov_bias(level, tokens))
        return DraftOutput(choice.output)

    @abstractmethod
    def forward(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        """States that guess [texts, depth, width], and their logits."""

    def add_markov_bias(self, logits: Tensor, before: Tensor) -> Tensor:
        """Logits behind these tokens."""
        return logits

    def write_confidence(self, states: Tensor, before: Tensor, sure: Tensor) -> None:
        """Say how sure the head is, where it says so itself."""


class GraphBlockDraft(GraphForward[BlockHead]):
    """Its keys and values stay in the copy of the pages that is made for the pass."""

    def __init__(self, head: BlockHead, keys: list[Tensor], values: list[Tensor], most_children: int) -> None:
        super().__init__(head, keys[0].shape[1], keys[0].device, most_children)
        self.keys, self.values, self.draft_rows = keys, values, head.config.block
        self.filler = head.mask_embeddings.clone()  # made here, because it takes a number from the host

    @property
    def depends_on_tokens(self) -> bool:
        return self.head.config.markov_rank > 0

    def forward(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        config, head = self.head.config, self.head
        memory = GraphKV(self.keys, self.values, config.layer, table.pages)
        anchors, block = table.field(TOKEN), config.block
        x = head.block_inputs_with(anchors, self.filler).flatten(0, 1)
        rows = torch.arange(block, device=self.device)
        turn = head.rope_rows((table.field(POSITION)[:, None] + rows).flatten())
        glance = GraphAttention(memory, memory.mask_bias(self._mask(memory, table, rows)), table.columns)
        states = head.run_layers(x, turn, glance).view(len(anchors), block, -1)
        states = head.draft_states(states)[:, : table.shape.depth]
        return states, head.output_logits(states)

    def _mask(self, memory: GraphKV, table: DraftTable, rows: Tensor) -> Tensor:
        """[texts, block, columns]; a window is the anchor's."""
        text = memory.context_mask(table.field(POSITION), table.columns, torch.full_like(rows, -1), first_position=0)
        guess = torch.arange(memory.columns - table.columns, device=self.device)
        limit = rows[:, None] if self.head.config.causal_in_block else len(rows) - 1
        own = (guess <= limit).expand(len(rows), -1)
        return torch.cat([text, own.expand(len(text), -1, -1)], -1)

    def add_markov_bias(self, logits: Tensor, before: Tensor) -> Tensor:
        return logits + self.head.markov_logits(before) if self.head.config.markov_rank else logits

    def write_confidence(self, states: Tensor, before: Tensor, sure: Tensor) -> None:
        if self.head.config.confidence:
            sure.copy_(self.head.confidence_logits(states, before).sigmoid())


class GraphMedusaDraft(GraphForward[MedusaHead]):
    """It looks at one state and at nothing behind it."""

    def __init__(self, head: MedusaHead, features: Tensor, most_children: int) -> None:
        """`features` [pages, page_size, 1, width]."""
        super().__init__(head, features.shape[1], features.device, most_children)
        self.state_cache = features.view(-1, features.shape[-1])

    def forward(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        states = self.head(self.state_cache.index_select(0, table.field(PREVIOUS_SLOT)), table.shape.depth)
        return states, self.head.logits(states)
