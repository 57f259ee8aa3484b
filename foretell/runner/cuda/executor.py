"""The CUDA executor: small steps replay CUDA graphs of a few padded shapes, large prefills run eagerly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from foretell.kernels.attention import AttentionLayout
from foretell.kernels.triton.argmax import argmax_logits
from foretell.kernels.triton.row_tables import NO_SPLIT, RowTables, StepShape
from foretell.kernels.triton.scatter_tokens import scatter_tokens
from foretell.kv.cache import KVCache
from foretell.models.decoder import Decoder
from foretell.runner.batch_layout import BatchLayout
from foretell.runner.cuda.draft_chain import CudaChain
from foretell.runner.cuda.forward import CudaForward
from foretell.runner.cuda.graph_shapes import (
    CAPTURE_DEPTHS,
    CAPTURE_ROWS,
    LARGE_TILE,
    PREFILL_TILE,
    ChainShape,
    chain_shape,
    next_power_of_2,
    padded_depth,
    split_step,
    step_shape,
)
from foretell.runner.cuda.graphs import GraphCache, GraphCapture
from foretell.runner.cuda.tables import Int32Array, PageTable, Tiles, make_tiles, write_tables
from foretell.runner.executor import AsyncStep, Executor, PendingChains, StepOutput, StepTokens
from foretell.sampling.cuda_sampler import SamplingBatch, sample_into

GraphOutput = tuple[Tensor, Tensor | None]  # logits and hidden states


class CudaExecutor(Executor):
    """Returns what `EagerExecutor` defines. Logits are valid until the next call."""

    supports_async = True
    supports_draft_chain = True

    def __init__(self, model: Decoder, cache: KVCache, layout: AttentionLayout) -> None:
        self.layout, self.vocab = layout, model.num_logits
        self.decoder = CudaForward(model, cache)
        self.context = max(len(table) for table in model.rope_tables.values())
        max_pages = min(len(cache.keys[0]), -(-self.context // layout.page_size))
        rows = CAPTURE_ROWS[-1]
        self.page_table = PageTable(rows, max_pages, layout.device)
        size = StepShape(rows, 2 * rows, LARGE_TILE, 0, CAPTURE_DEPTHS[-1], rows).table_size
        self._numbers = torch.zeros(size, dtype=torch.int32, device=layout.device)
        self._host = self._pinned(size)
        self._host_numbers: Int32Array = self._host.numpy()
        self._logits = torch.empty(0, self.vocab, device=layout.device)
        self._hidden_states = torch.empty(0, 0, dtype=model.dtype, device=layout.device)
        self._argmax = self._pinned(rows)  # of each row of the last step
        self._previous_tokens = self._pinned(rows)  # of the step before the one in flight
        self._sampled = torch.zeros(rows, dtype=torch.int32, device=layout.device)
        self._topk = self._pinned(0)
        self._tables_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._previous_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.num_steps = 0
        self._last_logits = self._logits  # of the last step; a graph keeps the buffer it was captured with
        self._idle = True  # the host has seen the end of the last step
        self._capture = GraphCapture(layout.device)
        self._graph_caches: dict[tuple[int, ...], GraphCache[StepShape, GraphOutput]] = {}
        # NCCL requires that all ranks capture a step or none does. So the decision must depend on what all ranks know,
        # which excludes clocks, and a larger graph cannot serve a smaller shape.
        self._allow_larger = model.ranks is None
        chains: GraphCache[ChainShape, Tensor] = GraphCache(layout.device, self._capture, self._allow_larger)
        self.chains = CudaChain(self.decoder, self.page_table, rows, layout.page_size, chains)

    def _pinned(self, numbers: int) -> Tensor:
        """Return a buffer of integers that the device and the host exchange."""
        return torch.zeros(numbers, dtype=torch.int32, pin_memory=self.layout.device.type == "cuda")

    def forward(self, packed: BatchLayout, hidden_layers: tuple[int, ...]) -> StepOutput:
        """Run a step in one or more passes; see `split_step` for the reason."""
        self.num_steps += 1
        passes = split_step(packed, CAPTURE_ROWS[-1])
        with torch.inference_mode():
            if len(passes) == 1:
                return self._step(packed, hidden_layers)
            outputs = [_copied(self._step(each, hidden_layers)) for each in passes]
            states = [output.hidden_states for output in outputs if output.hidden_states is not None]
            logits = torch.cat([output.logits for output in outputs])
            return StepOutput(logits, torch.cat(states) if states else None)

    def graph_cache(self, hidden_layers: tuple[int, ...] = ()) -> GraphCache[StepShape, GraphOutput]:
        """Return the graphs of steps that output the hidden states of these layers."""
        if hidden_layers not in self._graph_caches:
            self._graph_caches[hidden_layers] = GraphCache(self.layout.device, self._capture, self._allow_larger)
        return self._graph_caches[hidden_layers]

    def forward_device_draft(
        self, packed: BatchLayout, hidden_layers: tuple[int, ...], draft_tokens: Tensor
    ) -> StepOutput:
        self.num_steps += 1
        with torch.inference_mode():
            return self._step(packed, hidden_layers, draft_tokens)

    def _step(
        self, packed: BatchLayout, hidden_layers: tuple[int, ...], draft_tokens: Tensor | None = None
    ) -> StepOutput:
        requested, tiles = step_shape(packed, self.layout.queries_per_kv_head)
        if requested.rows > CAPTURE_ROWS[-1]:
            return self._run_eager(packed, hidden_layers)
        shape = self.graph_cache(hidden_layers).select(requested)
        self._send(packed, tiles, shape)
        if draft_tokens is not None:
            scatter_tokens(self._numbers[: shape.rows], draft_tokens, self._previous_tokens, 0)
        return self._replay(packed, shape, hidden_layers)

    def _replay(self, packed: BatchLayout, shape: StepShape, hidden_layers: tuple[int, ...]) -> StepOutput:
        """Run the step whose tables were sent, as a CUDA graph once its shape is captured."""
        self._grow_buffers(shape.rows, hidden_layers)
        logits, states = self.graph_cache(hidden_layers)(shape, lambda: self._run(shape, hidden_layers))
        count = len(packed.logits_indices)
        self._last_logits = logits[:count]
        unpadded = None if states is None else states[: packed.rows].clone()
        return StepOutput(self._last_logits, unpadded, lambda: self._wait_argmax(count))

    @torch.inference_mode()
    def forward_async(
        self, packed: BatchLayout, hidden_layers: tuple[int, ...], draws: SamplingBatch | None, top_k: int
    ) -> AsyncStep | None:
        """Launch a step after the one in flight; the host waits for an event between the two."""
        requested, tiles = step_shape(packed, self.layout.queries_per_kv_head)
        if requested.rows > CAPTURE_ROWS[-1]:
            return None
        self.num_steps += 1
        shape, count = self.graph_cache(hidden_layers).select(requested), len(self._last_logits)
        tokens = self._argmax
        if draws is not None:
            tokens = self._sampled
            sample_into(self._last_logits, draws, tokens[:count])
        top_tokens = self._copy_topk(top_k)
        self._send(packed, tiles, shape)
        scatter_tokens(self._numbers[: shape.rows], tokens, self._previous_tokens, count)
        self._previous_done.record()
        output = self._replay(packed, shape, hidden_layers)
        return AsyncStep(output, lambda: self._wait_previous(count, top_tokens))

    def _copy_topk(self, top_k: int) -> Tensor:
        """Start copying the top-k tokens of each row of the last step to the host, [rows, top_k]."""
        if not top_k:
            return self._topk[:0]
        if len(self._topk) < CAPTURE_ROWS[-1] * top_k:
            self._topk = self._pinned(CAPTURE_ROWS[-1] * top_k)
        found = self._topk[: len(self._last_logits) * top_k].view(-1, top_k)
        return found.copy_(self._last_logits.topk(top_k).indices, non_blocking=True)

    def _wait_previous(self, count: int, top_tokens: Tensor) -> StepTokens:
        """Wait for the tokens of the previous step, not for the one launched after it."""
        self._previous_done.synchronize()
        tokens: list[int] = self._previous_tokens[:count].tolist()
        return StepTokens(tokens, top_tokens.tolist())

    def _wait_argmax(self, count: int) -> list[int]:
        """Wait for the last step and return the argmax of its rows."""
        self._wait()
        tokens: list[int] = self._argmax[:count].tolist()
        return tokens

    def _wait(self) -> None:
        """Wait until the device has finished everything that was launched."""
        if not self._idle:
            torch.cuda.current_stream(self.layout.device).synchronize()
            self._idle = True

    @torch.inference_mode()
    def draft_chain(
        self, packed: BatchLayout, steps: int, vocab: int, draws: SamplingBatch | None
    ) -> PendingChains | None:
        first, tiles = step_shape(packed, self.layout.queries_per_kv_head)
        if first.rows > CAPTURE_ROWS[-1] or first.path_length:
            return None
        self._wait()
        ends = [min(len(span.pages) * self.layout.page_size, self.context) for span in packed.spans]
        requested = chain_shape(packed, first, self.layout.queries_per_kv_head, steps, vocab, draws is not None)
        chains = self.chains(packed, tiles, requested, ends, draws)
        self._tables_copied.record()  # the chain has copied the page table, too
        self._idle = False
        return chains

    def _send(self, packed: BatchLayout, tiles: Tiles | None, shape: StepShape) -> None:
        """Copy the tables of a step to the device."""
        self._wait_for_tables()
        self.page_table.update(packed.spans)
        write_tables(self._host_numbers, packed, tiles, shape)
        self._numbers[: shape.table_size].copy_(self._host[: shape.table_size], non_blocking=True)
        self._tables_copied.record()
        self._idle = False

    def _wait_for_tables(self) -> None:
        """Wait until the tables of the last pass were copied; those of a finished step were."""
        if not self._idle:
            self._tables_copied.synchronize()

    def _run(self, shape: StepShape, hidden_layers: tuple[int, ...]) -> GraphOutput:
        rows = RowTables.over(self._numbers, shape, self.page_table.table)
        logits, states = self.decoder(rows, rows.logit_rows, hidden_layers)
        output = self._logits[: shape.rows]
        argmax_logits(logits, output, self._argmax)
        return output, None if states is None else self._hidden_states[: shape.rows].copy_(states)

    def _grow_buffers(self, rows: int, hidden_layers: tuple[int, ...]) -> None:
        """Allocate the outputs of all steps, logits in float32; a graph keeps the buffers it was captured with.

        They are not taken from the graphs' memory pool: each graph would hold on to a part of it.
        """
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self.vocab, device=self.layout.device)
        width = len(hidden_layers) * self.decoder.model.config.width
        if self._hidden_states.shape[1] != width:
            dtype = self.decoder.model.dtype
            self._hidden_states = torch.empty(CAPTURE_ROWS[-1], width, dtype=dtype, device=self.layout.device)

    def _run_eager(self, packed: BatchLayout, hidden_layers: tuple[int, ...]) -> StepOutput:
        """Run a step that is too large for a CUDA graph, with tables of its own and unsplit keys."""
        height = max(PREFILL_TILE, next_power_of_2(self.layout.queries_per_kv_head))
        tiles = make_tiles(packed, height // self.layout.queries_per_kv_head, unsplit=True)
        depth = padded_depth(tiles.depth)
        shape = StepShape(packed.rows, len(tiles.shared), height, NO_SPLIT, depth, len(tiles.nodes))
        numbers = np.empty(shape.table_size, np.int32)
        write_tables(numbers, packed, tiles, shape)
        device = self.layout.device
        page_table = self.page_table
        if len(packed.spans) > CAPTURE_ROWS[-1]:
            page_table = PageTable(len(packed.spans), self.page_table.table.shape[1], device)
        self._wait_for_tables()
        rows = RowTables.over(torch.from_numpy(numbers).to(device), shape, page_table.update(packed.spans))
        self._tables_copied.record()
        self._idle = False
        logits, states = self.decoder(rows, rows.logit_rows[: len(packed.logits_indices)], hidden_layers)
        return StepOutput(logits.float(), states)


def _copied(output: StepOutput) -> StepOutput:
    """Return a copy that the next pass does not overwrite."""
    return replace(output, logits=output.logits.clone(), argmax=None)
