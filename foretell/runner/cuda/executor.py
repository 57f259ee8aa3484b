"""Runs steps on a CUDA device: small ones as recorded graphs of a few sizes, large prompts kernel by kernel."""

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
from foretell.runner.cuda.draft_chain import CudaChain, PendingChains
from foretell.runner.cuda.forward import CudaForward
from foretell.runner.cuda.graph_shapes import DEEP, HIGH, ROWS, WHOLE, ChainSizes, fit, fit_chain, levels_for, power
from foretell.runner.cuda.graphs import Capture, GraphCache
from foretell.runner.cuda.split_prefill import passes
from foretell.runner.cuda.tables import Numbers, PageTable, Tiles, fill, make_tiles
from foretell.runner.executor import AsyncStep, StepOutput, StepTokens
from foretell.sampling.cuda_sampler import SamplingBatch, sample_into

Left = tuple[Tensor, Tensor | None]  # what a step leaves: logits, and features


class CudaExecutor:
    """What `EagerExecutor` defines. Logits are good until the next call."""

    def __init__(self, model: Decoder, cache: KVCache, layout: AttentionLayout) -> None:
        self.layout, self.vocab = layout, model.num_logits
        self.forward = CudaForward(model, cache)
        self.context = max(len(table) for table in model.rope_tables.values())
        most_pages = min(len(cache.keys[0]), -(-self.context // layout.page_size))
        self.pages = PageTable(ROWS[-1], most_pages, layout.device)
        room = StepShape(ROWS[-1], 2 * ROWS[-1], HIGH, 0, DEEP[-1], ROWS[-1]).table_size
        self._numbers = torch.zeros(room, dtype=torch.int32, device=layout.device)
        self._host = torch.zeros(room, dtype=torch.int32, pin_memory=layout.device.type == "cuda")
        self._host_numbers: Numbers = self._host.numpy()
        self._logits = torch.empty(0, self.vocab, device=layout.device)
        self._features = torch.empty(0, 0, dtype=model.dtype, device=layout.device)
        self._tokens, self._landed = self._for_host(ROWS[-1]), self._for_host(ROWS[-1])
        self._drawn = torch.zeros(ROWS[-1], dtype=torch.int32, device=layout.device)
        self._top = self._for_host(0)
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.num_steps = 0
        self._left = self._logits  # what the last step left of them: a recording keeps the room it was made with
        self._idle = True  # whether the host has seen the end of the last step
        self._capture = Capture(layout.device)
        self._recorders: dict[tuple[int, ...], GraphCache[StepShape, Left]] = {}
        # Ranks run one step each in the same sizes, and all of them record it or none, for NCCL asks for that: what
        # decides must be known to all, and no two of them have the same clock.
        self._shares = model.ranks is None
        chains: GraphCache[ChainSizes, Tensor] = GraphCache(layout.device, self._capture, self._shares)
        self.chains = CudaChain(self.forward, self.pages, ROWS[-1], layout.page_size, chains)

    def _for_host(self, numbers: int) -> Tensor:
        """Where the device leaves whole numbers for the host."""
        return torch.zeros(numbers, dtype=torch.int32, pin_memory=self.layout.device.type == "cuda")

    def __call__(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        """In passes, so that the bits of what is written hang neither on prompts nor on how many write."""
        self.num_steps += 1
        several = passes(packed, ROWS[-1])
        if len(several) == 1:
            return self._step(packed, taps)
        outputs = [_kept(self._step(some, taps)) for some in several]
        features = [output.hidden_states for output in outputs if output.hidden_states is not None]
        return StepOutput(torch.cat([output.logits for output in outputs]), torch.cat(features) if features else None)

    def recorder(self, taps: tuple[int, ...] = ()) -> GraphCache[StepShape, Left]:
        """Of steps that are tapped there."""
        if taps not in self._recorders:
            self._recorders[taps] = GraphCache(self.layout.device, self._capture, self._shares)
        return self._recorders[taps]

    def forward_device_draft(self, packed: BatchLayout, taps: tuple[int, ...], guesses: Tensor) -> StepOutput:
        """See `Outrunner`."""
        self.num_steps += 1
        return self._step(packed, taps, guesses)

    def _step(self, packed: BatchLayout, taps: tuple[int, ...], guesses: Tensor | None = None) -> StepOutput:
        wanted, tiles = fit(packed, self.layout.queries_per_kv_head)
        if wanted.rows > ROWS[-1]:
            return self._run_unrecorded(packed, taps)
        sizes = self.recorder(taps).serving(wanted)
        self._send(packed, tiles, sizes)
        if guesses is not None:
            scatter_tokens(self._numbers[: sizes.rows], guesses, self._landed, 0)
        return self._replay(packed, sizes, taps)

    def _replay(self, packed: BatchLayout, sizes: StepShape, taps: tuple[int, ...]) -> StepOutput:
        """Run what was sent."""
        self._make_room(sizes.rows, taps)
        logits, features = self.recorder(taps)(sizes, lambda: self._run(sizes, taps))
        count = len(packed.wanted)
        self._left = logits[:count]
        own = None if features is None else features[: packed.rows].clone()
        return StepOutput(self._left, own, lambda: self._likeliest(count))

    def forward_async(
        self, packed: BatchLayout, taps: tuple[int, ...], draws: SamplingBatch | None, top: int
    ) -> AsyncStep | None:
        """See `Outrunner`. The host waits for an event between the two steps."""
        wanted, tiles = fit(packed, self.layout.queries_per_kv_head)
        if wanted.rows > ROWS[-1]:
            return None
        self.num_steps += 1
        sizes, count = self.recorder(taps).serving(wanted), len(self._left)
        chosen = self._tokens
        if draws is not None:
            chosen = self._drawn
            sample_into(self._left, draws, chosen[:count])
        best = self._best(top)
        self._send(packed, tiles, sizes)
        scatter_tokens(self._numbers[: sizes.rows], chosen, self._landed, count)
        self._over.record()
        return AsyncStep(self._replay(packed, sizes, taps), lambda: self._land(count, best))

    def _best(self, top: int) -> Tensor:
        """On its way to the host: of each row that the last step left the likeliest tokens, [rows, top]."""
        if not top:
            return self._top[:0]
        if len(self._top) < ROWS[-1] * top:
            self._top = self._for_host(ROWS[-1] * top)
        found = self._top[: len(self._left) * top].view(-1, top)
        return found.copy_(self._left.topk(top).indices, non_blocking=True)

    def _land(self, count: int, best: Tensor) -> StepTokens:
        """What the step came to that another was sent behind; what comes of that one is not waited for."""
        self._over.synchronize()
        tokens: list[int] = self._landed[:count].tolist()
        return StepTokens(tokens, best.tolist())

    def _likeliest(self, count: int) -> list[int]:
        """Of the last step; only now does the host wait for the device."""
        self._wait()
        tokens: list[int] = self._tokens[:count].tolist()
        return tokens

    def _wait(self) -> None:
        """Until the device has done all that it was given."""
        if not self._idle:
            torch.cuda.current_stream(self.layout.device).synchronize()
            self._idle = True

    def chain(
        self, packed: BatchLayout, steps: int, vocab: int, draws: SamplingBatch | None = None
    ) -> PendingChains | None:
        """After each sequence `steps` tokens, and how sure the model was; None if it is too much. See `CudaChain`.

        The spans hold all pages that their sequences may write to.
        """
        sizes, tiles = fit(packed, self.layout.queries_per_kv_head)
        if sizes.rows > ROWS[-1] or sizes.path_length:
            return None
        self._wait()
        ends = [min(len(span.pages) * self.layout.page_size, self.context) for span in packed.spans]
        wanted = fit_chain(packed, sizes, self.layout.queries_per_kv_head, steps, vocab, draws is not None)
        made = self.chains(packed, tiles, wanted, ends, draws)
        self._sent.record()  # it has sent pages, too
        self._idle = False
        return made

    def _send(self, packed: BatchLayout, tiles: Tiles | None, sizes: StepShape) -> None:
        """Take the tables to where the kernels read them."""
        self._wait_for_tables()
        self.pages.update(packed.spans)
        fill(self._host_numbers, packed, tiles, sizes)
        self._numbers[: sizes.table_size].copy_(self._host[: sizes.table_size], non_blocking=True)
        self._sent.record()
        self._idle = False

    def _wait_for_tables(self) -> None:
        """Until those of the last pass have left; of a step that is over they have."""
        if not self._idle:
            self._sent.synchronize()

    def _run(self, sizes: StepShape, taps: tuple[int, ...]) -> Left:
        rows = RowTables.over(self._numbers, sizes, self.pages.device)
        logits, features = self.forward(rows, rows.logit_rows, taps)
        left = self._logits[: sizes.rows]
        argmax_logits(logits, left, self._tokens)
        return left, None if features is None else self._features[: sizes.rows].copy_(features)

    def _make_room(self, rows: int, taps: tuple[int, ...]) -> None:
        """Where all steps leave their results, in float32 the logits; recordings keep what they were made with. It is
        not from the graphs' own memory: else each would hold on to some of that."""
        if len(self._logits) < rows:
            self._logits = torch.empty(rows, self.vocab, device=self.layout.device)
        width = len(taps) * self.forward.model.config.width
        if self._features.shape[1] != width:
            dtype = self.forward.model.dtype
            self._features = torch.empty(ROWS[-1], width, dtype=dtype, device=self.layout.device)

    def _run_unrecorded(self, packed: BatchLayout, taps: tuple[int, ...]) -> StepOutput:
        """A step too large to be recorded: tables of its own, one program for all keys of some rows."""
        height = max(WHOLE, power(self.layout.queries_per_kv_head))
        tiles = make_tiles(packed, height // self.layout.queries_per_kv_head, whole=True)
        sizes = StepShape(packed.rows, len(tiles.together), height, NO_SPLIT, levels_for(tiles.deep), len(tiles.nodes))
        numbers = np.empty(sizes.table_size, np.int32)
        fill(numbers, packed, tiles, sizes)
        device = self.layout.device
        pages = self.pages
        if len(packed.spans) > ROWS[-1]:
            pages = PageTable(len(packed.spans), self.pages.device.shape[1], device)
        self._wait_for_tables()
        rows = RowTables.over(torch.from_numpy(numbers).to(device), sizes, pages.update(packed.spans))
        self._sent.record()
        self._idle = False
        logits, features = self.forward(rows, rows.logit_rows[: len(packed.wanted)], taps)
        return StepOutput(logits.float(), features)


def _kept(output: StepOutput) -> StepOutput:
    """What the next pass does not write over."""
    return replace(output, logits=output.logits.clone(), argmax=None)
