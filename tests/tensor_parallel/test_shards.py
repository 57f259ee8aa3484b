"""Shards of a model return what the whole returns: every kind of layer, every executor that runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretell.kernels.native.library import library
from foretell.models.config import ModelConfig, Rope
from foretell.models.decoder import Decoder
from foretell.models.quantize import quantize_weights
from foretell.models.sharding import Shard
from foretell.runner.batch_layout import pack
from foretell.runner.executor import EagerExecutor, Executor
from foretell.runner.model_runner import ModelRunner
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence
from tests.runner.harness import random_model
from tests.tensor_parallel.fake_ranks import FakeRanks, run_ranks
from tests.tensor_parallel.sharding import part_of

BASE = ModelConfig(vocab=70, width=24, layers=2, heads=6, kv_heads=3, head_dim=8, ffn=44, context=128)
CONFIGS = {
    "three groups": BASE,
    "biases": replace(BASE, qkv_bias=True, out_bias=True, mlp_bias=True, tied=False),
    "all norms": replace(
        BASE, heads=4, kv_heads=1, qk_norm=True, sandwich_norms=True, embed_scale=4.9, activation="gelu_tanh",
        windows=(5, None), family="gemma3",
    ),
    "post-norms, multipliers, caps": replace(
        BASE, pre_norms=False, sandwich_norms=True, residual_scale=0.3, logit_scale=0.2, logit_softcap=2.0,
        ropes=(Rope(original_context=4, query_growth=0.4), Rope(kind="none")), attention_scale=0.2,
    ),
}  # fmt: skip
TREE = Draft((1, 2, 3, 4, 65), (-1, -1, 0, 0, 1))


def text() -> list[int]:
    return [(11 * i + 5) % 70 for i in range(20)]


def run(model: Decoder, make: Callable[[ModelRunner], Executor] | None) -> tuple[Tensor, Tensor]:
    """Return logits and hidden states of a step with a tree, after a prefill step."""
    taps = tuple(range(model.config.layers + 1))
    runner = ModelRunner(model, 32, 4, 128, taps)
    if make is not None:
        runner.executor = make(runner)
    request = Request("x", tuple(text()), SamplingParams(), 0, 4)
    seq = Sequence(0, request, text())
    assert runner.reserve(seq, 40)
    runner.executor.forward(pack([ScheduledSequence.of(seq, 12)], [Draft()], 4), taps)
    seq.num_computed_tokens = 12
    output = runner.executor.forward(pack([ScheduledSequence.of(seq, 8)], [TREE], 4), taps)
    assert output.hidden_states is not None
    return output.logits, output.hidden_states


def eager(runner: ModelRunner) -> Executor:
    return EagerExecutor(runner.model, runner.cache, runner.layout)


def cuda(runner: ModelRunner) -> Executor:
    pytest.importorskip("triton", reason="Triton is not installed")
    from foretell.runner.cuda.executor import CudaExecutor

    return CudaExecutor(runner.model, runner.cache, runner.layout)


EXECUTORS: dict[str, Callable[[ModelRunner], Executor] | None] = {"eager": eager, "the best of this machine": None}


def split(model: Decoder, size: int, make: Callable[[ModelRunner], Executor] | None) -> tuple[Tensor, Tensor]:
    """Return the leader's result."""

    def one(ranks: FakeRanks) -> tuple[Tensor, Tensor]:
        part = part_of(model, Shard(ranks.rank, size))
        part.join_ranks(ranks)
        return run(part, make)

    return run_ranks(size, one)[0]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_shards_return_what_the_whole_returns(config: ModelConfig, size: int, executor: str) -> None:
    model = random_model(config)
    found = split(model, size, EXECUTORS[executor])
    with torch.inference_mode():
        whole = run(model, EXECUTORS[executor])
    for mine, defined in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, defined, rtol=2e-4, atol=2e-4)


class Still:
    """A fake event or stream on a machine without a device."""

    def __init__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


def test_the_cuda_executor_with_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="no Triton is here")
    if not torch.cuda.is_available():
        for name in ("Event", "Stream", "current_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, Still)
    monkeypatch.setattr("foretell.runner.cuda.executor.CAPTURE_ROWS", (1, 2, 4, 8, 16))
    model = random_model(replace(CONFIGS["all norms"], layers=1, windows=(5,), ropes=()))
    found = split(model, 2, cuda)
    with torch.inference_mode():
        whole = run(model, eager)
    for mine, defined in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, defined, rtol=5e-4, atol=5e-4)


@pytest.mark.skipif(library() is None, reason="no compiler is here")
def test_a_quantized_row_with_shards_has_the_same_bits_in_any_batch() -> None:
    model = random_model(BASE)

    def one(ranks: FakeRanks) -> tuple[Tensor, Tensor]:
        part = quantize_weights(part_of(model, Shard(ranks.rank, 2)), 8)
        part.join_ranks(ranks)
        runner = ModelRunner(part, 32, 4, 128)
        seq = Sequence(0, Request("x", tuple(text()), SamplingParams(), 0, 4), text())
        assert runner.reserve(seq, 40)
        together = runner.executor.forward(
            pack([ScheduledSequence.of(seq, 20)], [Draft.chain([7, 8, 9])], 4), ()
        ).logits[0]
        for _ in range(20):
            alone = runner.executor.forward(pack([ScheduledSequence.of(seq, 1)], [Draft()], 4), ()).logits
            seq.num_computed_tokens += 1
        return together, alone[0]

    together, alone = run_ranks(2, one)[0]
    assert torch.equal(together, alone)
