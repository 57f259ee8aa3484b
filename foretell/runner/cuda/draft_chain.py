"""Chains of a draft model as one CUDA graph: tokens feed the next step on the device, the host waits at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.kernels.triton.chain_step import chain_step
from foretell.kernels.triton.copy_from_host import copy_from_host
from foretell.kernels.triton.row_tables import RowTables, StepShape
from foretell.kernels.triton.sample import FIELDS
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.forward import CudaForward
from foretell.runner.cuda.graph_shapes import ChainShape
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.cuda.tables import Int32Array, PageTable, Tiles, write_tables
from foretell.runner.executor import PendingChains
from foretell.sampling.cuda_sampler import SamplingBatch, pack_settings


class SamplingBuffers:
    """Sampling parameters of every token of a chain, written before the chain runs.

    They depend on a token's position only, not on the tokens before it.
    """

    def __init__(self, steps: int, sequences: int, device: torch.device) -> None:
        shape = (steps, sequences, FIELDS)
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(shape, dtype=torch.int64, device=device)

    def write(self, draws: SamplingBatch, counts: list[int]) -> None:
        """Write the parameters of the first `counts` tokens of each sequence.

        Padded rows sample nothing: their logits may be NaN.
        """
        cells = [(step, i) for i, count in enumerate(counts) for step in range(count)]
        steps, sequences = zip(*cells, strict=True)
        params, seeds = ([each[i] for i in sequences] for each in (draws.params, draws.seeds))
        positions = [draws.positions[i] + step for step, i in cells]
        numbers = self._host.numpy()
        numbers[:] = 0
        numbers[steps, sequences] = pack_settings(SamplingBatch(params, seeds, positions))

    def fetch(self) -> Tensor:
        """Copy the parameters to the device, as int32 halves like all tables; return [steps, sequences, FIELDS]."""
        copy_from_host(self._host.view(torch.int32).view(-1), self._device.view(torch.int32).view(-1))
        return self._device


class CudaChain:
    """Drafts chains of tokens, argmax or sampled. It has tables of its own, since graphs keep the ones they use."""

    def __init__(
        self,
        decoder: CudaForward,
        page_table: PageTable,
        max_rows: int,
        page_size: int,
        graphs: GraphCache[ChainShape, Tensor],
    ) -> None:
        self.device = device = page_table.table.device
        self.decoder, self.page_table, self.page_size, self.graphs = decoder, page_table, page_size, graphs
        size = StepShape(max_rows, max_rows, 32, 0).table_size
        self._first = torch.zeros(size + max_rows, dtype=torch.int32, device=device)
        self._host = torch.zeros(size + max_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host_numbers: Int32Array = self._host.numpy()
        self._decode = torch.zeros(size, dtype=torch.int32, device=device)
        # By steps and sequences. Pinned: the device writes into them, and the host only waits for the end.
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sampling: dict[tuple[int, int], SamplingBuffers] = {}

    def __call__(
        self,
        packed: BatchLayout,
        tiles: Tiles | None,
        requested: ChainShape,
        ends: list[int],
        draws: SamplingBatch | None = None,
    ) -> PendingChains:
        """Draft a chain for each sequence, with the confidence of each token.

        `ends` are the positions where the pages of the sequences end. `draws` describes how the first token of each
        sequence is sampled; the later ones follow by their positions.
        """
        self._synchronize()  # the tables of the previous chains are overwritten now
        shape = self.graphs.select(requested)
        # Padded steps run no rows: their keys might need more splits than there are.
        stops = [span.stop + requested.steps - 1 for span in packed.spans]
        ends = [min(both) for both in zip(ends, stops, strict=True)]
        self._write(packed, tiles, shape, ends)
        if draws is not None:
            counts = [max(1, end - span.stop + 1) for end, span in zip(ends, packed.spans, strict=True)]
            self._sampling_buffers(shape).write(draws, counts)
        output = self.graphs(shape, lambda: self._run(shape))
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self.device))
        return PendingChains(output, requested.steps, len(packed.spans), self._synchronize)

    def _synchronize(self) -> None:
        """Wait until the last chains are finished; afterwards their tables may be written again."""
        if self._done is not None:
            self._done.synchronize()

    def _write(self, packed: BatchLayout, tiles: Tiles | None, shape: ChainShape, ends: list[int]) -> None:
        """Write the tables where the graph copies them from."""
        self.page_table.update(packed.spans)
        write_tables(self._host_numbers, packed, tiles, shape.first)
        count = shape.first.table_size
        self._host_numbers[count : count + shape.sequences] = ends + [0] * (shape.sequences - len(ends))

    def _run(self, shape: ChainShape) -> Tensor:
        count = shape.first.table_size + shape.sequences
        copy_from_host(self._host[:count], self._first[:count])
        rows = RowTables.over(self._first, shape.first, self.page_table.table)
        decode = RowTables.over(self._decode, shape.decode, self.page_table.table)
        ends = self._first[shape.first.table_size : count]
        output = self._output(shape.steps, shape.sequences)
        draws = self._sampling_buffers(shape).fetch() if shape.sampled else None
        for step in range(shape.steps):
            logits, _ = self.decoder(rows, rows.logit_rows[: shape.sequences], ())
            sampling = None if draws is None else draws[step]
            chain_step(logits[:, : shape.vocab], rows, ends, decode, output[:, step], self.page_size, sampling)
            rows = decode
        return output

    def _sampling_buffers(self, shape: ChainShape) -> SamplingBuffers:
        """Return the buffers of a shape. They are written before the chain runs, so no capture allocates them."""
        key = shape.steps, shape.sequences
        if key not in self._sampling:
            self._sampling[key] = SamplingBuffers(*key, self.device)
        return self._sampling[key]

    def _output(self, steps: int, sequences: int) -> Tensor:
        """Return the buffer for tokens and confidences. A chain runs eagerly first, so no capture allocates it."""
        if (steps, sequences) not in self._outputs:
            pinned = self.device.type == "cuda"
            self._outputs[steps, sequences] = torch.zeros(2, steps, sequences, pin_memory=pinned)
        return self._outputs[steps, sequences]
