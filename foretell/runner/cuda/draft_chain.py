"""A whole chain of guesses as one graph: each token feeds the next on the device, and the host waits at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.kernels.triton.chain_step import chain_step
from foretell.kernels.triton.copy_from_host import copy_from_host
from foretell.kernels.triton.row_tables import RowTables, StepShape
from foretell.kernels.triton.sample import FIELDS
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.forward import CudaForward
from foretell.runner.cuda.graph_shapes import ChainSizes
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.cuda.tables import Numbers, PageTable, Tiles, fill
from foretell.sampling.cuda_sampler import SamplingBatch, pack_settings

Chains = tuple[list[list[int]], list[list[float]]]  # by sequence: tokens, and how sure the model was of each


@dataclass(frozen=True)
class PendingChains:
    """`found` [2, levels, texts] are tokens and how sure they are, in float32: good from the end of the work on, which
    `finish` waits for, until the next chains are made. There may be levels and texts that nobody asked for."""

    found: Tensor
    steps: int
    texts: int
    finish: Callable[[], None]

    @property
    def token_buffer(self) -> Tensor:
        """The tokens, flat."""
        return self.found[0].view(-1)

    def places(self, text: int, nodes: int) -> list[int]:
        """Where the first tokens of a text's chain are in that."""
        across = self.found.shape[2]
        return list(range(text, nodes * across, across))

    def wait(self) -> Chains:
        """All of them."""
        self.finish()
        tokens, sure = self.found[:, : self.steps, : self.texts].tolist()
        chains = [[int(token) for token in chain] for chain in zip(*tokens, strict=True)]
        return chains, [list(chain) for chain in zip(*sure, strict=True)]


class _Settings:
    """How each token of a chain is drawn, for all steps beforehand: that hangs on its place, not on what it will be."""

    def __init__(self, steps: int, sequences: int, device: torch.device) -> None:
        shape = (steps, sequences, FIELDS)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = torch.zeros(shape, dtype=torch.int64, device=device)

    def write(self, draws: SamplingBatch, counts: list[int]) -> None:
        """For so many tokens of each sequence. What is run to fill up draws nothing: it may be no numbers at all."""
        places = [(step, i) for i, count in enumerate(counts) for step in range(count)]
        steps, sequences = zip(*places, strict=True)
        params, seeds = ([each[i] for i in sequences] for each in (draws.params, draws.seeds))
        positions = [draws.positions[i] + step for step, i in places]
        numbers = self._host.numpy()
        numbers[:] = 0
        numbers[steps, sequences] = pack_settings(SamplingBatch(params, seeds, positions))

    def copy_from_host(self) -> Tensor:
        """[steps, sequences, FIELDS] on the device, in halves of words as all tables come."""
        copy_from_host(self._host.view(torch.int32).view(-1), self._there.view(torch.int32).view(-1))
        return self._there


class CudaChain:
    """Tokens one after the other, the likeliest or drawn. Its tables are its own: the executor's graphs keep theirs."""

    def __init__(
        self,
        forward: CudaForward,
        pages: PageTable,
        most_rows: int,
        page_size: int,
        recorder: GraphCache[ChainSizes, Tensor],
    ) -> None:
        self.device = device = pages.device.device
        self.forward, self.pages, self.page_size, self.recorder = forward, pages, page_size, recorder
        room = StepShape(most_rows, most_rows, 32, 0).table_size
        self._first = torch.zeros(room + most_rows, dtype=torch.int32, device=device)
        self._host = torch.zeros(room + most_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host_numbers: Numbers = self._host.numpy()
        self._following = torch.zeros(room, dtype=torch.int32, device=device)
        # Pinned, by steps and sequences: the device writes there, and the host has only to wait for its end.
        self._found: dict[tuple[int, int], Tensor] = {}
        self._over = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._settings: dict[tuple[int, int], _Settings] = {}

    def __call__(
        self,
        packed: BatchLayout,
        tiles: Tiles | None,
        wanted: ChainSizes,
        ends: list[int],
        draws: SamplingBatch | None = None,
    ) -> PendingChains:
        """For each sequence its tokens, and how sure the model is of each. `ends`: places where its pages end. `draws`:
        how the first token of each is drawn; those behind it stand at the places that follow."""
        self._finish()  # the chains before, whose tables are written over
        sizes = self.recorder.serving(wanted)
        # In steps beyond those that are wanted nothing is run: there might be more keys than parts for them.
        stops = [span.stop + wanted.steps - 1 for span in packed.spans]
        ends = [min(both) for both in zip(ends, stops, strict=True)]
        self._write(packed, tiles, sizes, ends)
        if draws is not None:
            counts = [max(1, end - span.stop + 1) for end, span in zip(ends, packed.spans, strict=True)]
            self._settings_of(sizes).write(draws, counts)
        found = self.recorder(sizes, lambda: self._run(sizes))
        if self._over is not None:
            self._over.record(torch.cuda.current_stream(self.device))
        return PendingChains(found, wanted.steps, len(packed.spans), self._finish)

    def _finish(self) -> None:
        """Wait until all is found; then the tables may be written again, too."""
        if self._over is not None:
            self._over.synchronize()

    def _write(self, packed: BatchLayout, tiles: Tiles | None, sizes: ChainSizes, ends: list[int]) -> None:
        """The tables, where the graph fetches them."""
        self.pages.update(packed.spans)
        fill(self._host_numbers, packed, tiles, sizes.first)
        count = sizes.first.table_size
        self._host_numbers[count : count + sizes.sequences] = ends + [0] * (sizes.sequences - len(ends))

    def _run(self, sizes: ChainSizes) -> Tensor:
        count = sizes.first.table_size + sizes.sequences
        copy_from_host(self._host[:count], self._first[:count])
        rows = RowTables.over(self._first, sizes.first, self.pages.device)
        following = RowTables.over(self._following, sizes.following, self.pages.device)
        ends = self._first[sizes.first.table_size : count]
        found = self._room(sizes.steps, sizes.sequences)
        draws = self._settings_of(sizes).copy_from_host() if sizes.drawn else None
        for step in range(sizes.steps):
            logits, _ = self.forward(rows, rows.logit_rows[: sizes.sequences], ())
            own = None if draws is None else draws[step]
            chain_step(logits[:, : sizes.vocab], rows, ends, following, found[:, step], self.page_size, own)
            rows = following
        return found

    def _settings_of(self, sizes: ChainSizes) -> _Settings:
        """They are written before the chain is run, so none are made while it is recorded."""
        key = sizes.steps, sizes.sequences
        if key not in self._settings:
            self._settings[key] = _Settings(*key, self.device)
        return self._settings[key]

    def _room(self, steps: int, sequences: int) -> Tensor:
        """For tokens and how sure they are. A chain is run plainly before it is recorded, so none is made in there."""
        if (steps, sequences) not in self._found:
            pinned = self.device.type == "cuda"
            self._found[steps, sequences] = torch.zeros(2, steps, sequences, pin_memory=pinned)
        return self._found[steps, sequences]
