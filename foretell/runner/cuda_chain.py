"""A whole chain of guesses as one graph: each token feeds the next on the device, and the host waits once."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.triton.fetch import fetch
from foretell.kernels.triton.pick import pick_next
from foretell.kernels.triton.tables import RowTables, Sizes

from .cuda_forward import CudaForward
from .cuda_sizes import ChainSizes
from .cuda_tables import Numbers, PageTable, Tiles, fill
from .pack import Packed
from .recording import Recorder


class CudaChain:
    """The likeliest tokens, one after the other. Its tables are its own: the executor's graphs keep theirs."""

    def __init__(
        self,
        forward: CudaForward,
        pages: PageTable,
        most_rows: int,
        page_size: int,
        recorder: Recorder[ChainSizes, Tensor],
    ) -> None:
        self.device = device = pages.device.device
        self.forward, self.pages, self.page_size, self.recorder = forward, pages, page_size, recorder
        room = Sizes(most_rows, most_rows, 32, 0).numbers
        self._first = torch.zeros(room + most_rows, dtype=torch.int32, device=device)
        self._host = torch.zeros(room + most_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host_numbers: Numbers = self._host.numpy()
        self._following = torch.zeros(room, dtype=torch.int32, device=device)
        # Pinned, by steps and sequences: the device writes there, and the host has only to wait for its end.
        self._found: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self, packed: Packed, tiles: Tiles | None, wanted: ChainSizes, ends: list[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """For each sequence its tokens, and how sure the model is of each. `ends`: places where its pages end."""
        sizes = self.recorder.serving(wanted)
        # In steps beyond those that are wanted nothing is run: there might be more keys than parts for them.
        stops = [span.stop + wanted.steps - 1 for span in packed.spans]
        self._write(packed, tiles, sizes, [min(both) for both in zip(ends, stops, strict=True)])
        found = self.recorder(sizes, lambda: self._run(sizes))
        self._wait()
        tokens, sure = found[:, : wanted.steps, : len(packed.spans)].tolist()
        chains = [[int(token) for token in chain] for chain in zip(*tokens, strict=True)]
        return chains, [list(chain) for chain in zip(*sure, strict=True)]

    def _wait(self) -> None:
        """Until all is found; then the tables may be written again, too."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _write(self, packed: Packed, tiles: Tiles | None, sizes: ChainSizes, ends: list[int]) -> None:
        """The tables, where the graph fetches them."""
        self.pages.update(packed.spans)
        fill(self._host_numbers, packed, tiles, sizes.first)
        count = sizes.first.numbers
        self._host_numbers[count : count + sizes.sequences] = ends + [0] * (sizes.sequences - len(ends))

    def _run(self, sizes: ChainSizes) -> Tensor:
        count = sizes.first.numbers + sizes.sequences
        fetch(self._host[:count], self._first[:count])
        rows = RowTables.over(self._first, sizes.first, self.pages.device)
        following = RowTables.over(self._following, sizes.following, self.pages.device)
        ends = self._first[sizes.first.numbers : count]
        found = self._room(sizes.steps, sizes.sequences)
        for step in range(sizes.steps):
            logits, _ = self.forward(rows, rows.wanted[: sizes.sequences], ())
            pick_next(logits, sizes.vocab, rows, ends, following, found[:, step], self.page_size)
            rows = following
        return found

    def _room(self, steps: int, sequences: int) -> Tensor:
        """For tokens and how sure they are. A chain is run plainly before it is recorded, so none is made in there."""
        if (steps, sequences) not in self._found:
            pinned = self.device.type == "cuda"
            self._found[steps, sequences] = torch.zeros(2, steps, sequences, pin_memory=pinned)
        return self._found[steps, sequences]
