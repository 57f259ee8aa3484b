"""Step times, drafters and memory: properties of every device and model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.errors import RequestError
from foretell.plan.devices import catalog, find_device
from foretell.plan.drafter_cost import best_step, break_even, estimate_step, find_drafter
from foretell.plan.memory import plan_memory
from foretell.plan.model_shape import find_model_shape
from foretell.plan.steps import Precision, precision_of
from foretell.utils.speculation_math import expected_tokens
from tests.plan.deployments import deployed

DEVICES = list(catalog()["gpus"])


@pytest.mark.parametrize("gpu", DEVICES)
def test_step_time_is_monotone(gpu: str) -> None:
    model = deployed("llama-3.2-1b", gpu)
    for one, other in [((1, 1, 512), (1, 5, 512)), ((1, 5, 512), (8, 5, 512)), ((8, 5, 512), (8, 5, 4096))]:
        assert model.step(*one).total <= model.step(*other).total
    reading = model.shape.active_weights * model.precision.weight_bytes / model.device.bandwidth
    assert model.step(1, 1, 512).total > reading


def test_small_steps_are_bandwidth_bound_and_large_ones_compute_bound() -> None:
    model = deployed("llama-3.1-70b", "h100")
    one, many = model.step(1, 1, 512), model.step(256, 1, 512)
    assert one.weights > 20 * one.products and many.products > 0.9 * many.weights
    faster = replace(model, device=model.device.with_overrides(bandwidth_gb_s=2 * 3350))
    assert faster.step(1, 1, 512).weights == pytest.approx(one.weights / 2)
    quicker = replace(model, device=model.device.with_overrides(tflops=2 * 989))
    assert quicker.step(256, 1, 512).products == pytest.approx(many.products / 2)


def test_rows_are_padded_and_large_steps_run_in_passes() -> None:
    model = deployed("llama-3.1-8b", "h100")
    assert model.step(1, 5, 1).products == model.step(1, 8, 1).products
    full, more = model.step(1, 256, 1), model.step(1, 257, 1)
    assert more.weights == pytest.approx(2 * full.weights) and more.layers == 2 * full.layers
    assert model.prefill_seconds(2048) < model.step(1, 2048, 1024).total, "prefill runs in one pass"


def test_quantized_weights_are_read_faster() -> None:
    model = deployed("llama-3.1-8b", "h100")
    half = replace(model, precision=Precision("fp8", 8.0))
    assert half.step(1, 1, 512).weights == pytest.approx(model.step(1, 1, 512).weights / 2)
    assert half.step(64, 1, 512).products < model.step(64, 1, 512).products
    assert precision_of("auto", replace(model.shape, bits=4.5), "dtype").bits == 4.5


def test_tensor_parallelism_splits_the_work_and_costs_all_reduces() -> None:
    one, four = deployed("llama-3.1-70b"), deployed("llama-3.1-70b", split=4)
    alone, together = one.step(8, 1, 4096), four.step(8, 1, 4096)
    assert together.weights == pytest.approx(alone.weights / 4) and alone.exchange == 0
    latency = 2 * 80 * four.device.link.latency
    assert together.exchange > latency and together.layers == alone.layers
    assert together.total < alone.total
    slow = deployed("llama-3.1-70b", "l40s", split=4)  # over PCIe
    assert slow.step(64, 1, 4096).exchange > four.step(64, 1, 4096).exchange
    assert deployed("llama-3.1-70b", split=16).kv_split == 8, "there are 8 KV heads"


def test_expected_tokens() -> None:
    for rate in (0.0, 0.3, 0.8):
        for length in (0, 1, 4, 16):
            assert expected_tokens(rate, length) == pytest.approx(sum(rate**i for i in range(length + 1)))
    assert expected_tokens(1.0, 4) == 5


def test_the_best_length_is_the_fastest() -> None:
    target = deployed("llama-3.1-8b")
    for draft in ("ngram", "eagle", "llama-3.2-1b", "self:int4"):
        drafter = find_drafter(draft, target)
        for batch in (1, 32):
            best = best_step(target, drafter, batch, 2048, 16, 0.7)
            others = [
                estimate_step(target, drafter, batch, 2048, length, 0.7).tokens_per_second for length in range(17)
            ]
            assert best.tokens_per_second == max(others)
        assert best_step(target, drafter, 1, 2048, 16, 0.0).length == 0, "rejected drafts do not pay"


def test_the_speedup_at_break_even_is_1() -> None:
    target = deployed("llama-3.1-8b")
    drafter = find_drafter("llama-3.2-1b", target)
    for batch, length in [(1, 4), (32, 2), (64, 8)]:
        plain, speculative = (estimate_step(target, drafter, batch, 2048, k, 0.5) for k in (0, length))
        rate = break_even(plain, speculative)
        assert rate is not None
        again = estimate_step(target, drafter, batch, 2048, length, rate)
        assert again.tokens_per_second == pytest.approx(plain.tokens_per_second, rel=1e-4)
    expensive = find_drafter("llama-3.1-70b", target)  # more expensive than the target
    plain, speculative = (estimate_step(target, expensive, 1, 2048, k) for k in (0, 4))
    assert break_even(plain, speculative) is None


def test_drafts_cost_the_steps_of_their_model() -> None:
    target = deployed("llama-3.1-70b", split=4)
    small = find_drafter("llama-3.2-1b", target)
    assert small.model is not None and small.model.tensor_parallel == 1
    assert small.seconds(1, 4, 512) == pytest.approx(4 * small.model.step(1, 1, 512).total)
    assert find_drafter("ngram", target).seconds(1, 4, 512) == 0
    head, copy = find_drafter("eagle", target), find_drafter("self:int4", target)
    assert head.seconds(1, 4, 512) < small.seconds(1, 4, 512) < copy.seconds(1, 4, 512)
    assert copy.kv_bytes_per_token == 0 and copy.weight_bytes < target.weight_bytes / 3
    with pytest.raises(RequestError, match="self:int8 or self:int4"):
        find_drafter("self:int3", target)


def test_the_largest_batch_fills_the_memory() -> None:
    target = deployed("llama-3.1-8b")
    drafter = find_drafter("llama-3.2-1b", target)
    most = plan_memory(target, drafter, 1, 8192, 4).max_batch
    assert 30 < most < 60
    # The logits of a larger batch take memory as well, so the bound is exact to one sequence.
    assert (
        plan_memory(target, drafter, most - 1, 8192, 4).fits
        and not plan_memory(target, drafter, most + 1, 8192, 4).fits
    )
    one = plan_memory(target, drafter, 1, 8192, 4)
    pages = -(-(8192 + 5) // 16)
    assert one.kv_cache == pytest.approx(pages * 16 * 2 * (target.shape.kv_values_per_token + 16 * 2 * 8 * 64))
    assert one.weights == pytest.approx(2 * target.shape.weights)


def test_unknown_devices_and_data_types_are_rejected() -> None:
    with pytest.raises(RequestError, match="did you mean 'h100'"):
        find_device("h10")
    with pytest.raises(RequestError, match="did you mean 'bfloat16'"):
        precision_of("bfloat", find_model_shape("phi-4", "target"), "dtype")
    assert find_device("H100").name == "h100"
