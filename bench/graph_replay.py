"""What recorded work takes on a CUDA device when nothing else is in its way: its graph is replayed again and again."""

from __future__ import annotations

import torch

from foretell.runner.batch_layout import pack
from foretell.runner.cuda.executor import CudaExecutor
from foretell.runner.cuda.graph_shapes import chain_shape, step_shape
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence

REPEATS = 20


def share_of(runner: ModelRunner, number: int, start: int, rows: int) -> tuple[ScheduledSequence, Draft]:
    """A sequence with `start` cached tokens, and `rows` to run: its last token and a draft."""
    tokens = [(i * 7 + number) % 1000 for i in range(start + 1)]
    seq = Sequence(number, Request(str(number), (), SamplingParams(), 0, 0), tokens, start)
    assert runner.reserve(seq, start + rows), "the cache is large enough"
    return ScheduledSequence.of(seq, 1), Draft.chain(tokens[1:rows])


def step_ms(runner: ModelRunner, sequences: int, start: int, rows: int) -> float:
    """Milliseconds of a step of so many sequences, each with so many rows."""
    pairs = [share_of(runner, i, start, rows) for i in range(sequences)]
    shares, drafts = [share for share, _ in pairs], [draft for _, draft in pairs]
    runner.forward(shares, drafts)
    executor = _executor(runner)
    sizes, _ = step_shape(pack(shares, drafts, runner.layout.page_size), runner.layout.queries_per_kv_head)
    took = _replayed(executor.graph_cache().graphs[sizes])
    for share in shares:
        runner.trim(share.seq, 0)
    return took


def chain_ms(runner: ModelRunner, start: int, steps: int, vocab: int) -> float:
    """Return the milliseconds of a draft model's chain for one sequence with all but its last token prefilled."""
    share, _ = share_of(runner, 0, start, 1 + steps)
    runner.draft_chain([share], steps, vocab)
    packed, heads = pack([share], [Draft()], runner.layout.page_size), runner.layout.queries_per_kv_head
    sizes = chain_shape(packed, step_shape(packed, heads)[0], heads, steps, vocab)
    took = _replayed(_executor(runner).chains.graphs.graphs[sizes])
    runner.trim(share.seq, 0)
    return took


def _executor(runner: ModelRunner) -> CudaExecutor:
    assert isinstance(runner.executor, CudaExecutor)
    return runner.executor


def _replayed(recording: tuple[torch.cuda.CUDAGraph, object] | None) -> float:
    assert recording is not None, "there is memory for it"
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPEATS):
        recording[0].replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / REPEATS
