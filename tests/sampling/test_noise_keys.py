"""What a kernel is given to make its noise from is what the definition makes it from."""

from __future__ import annotations

import numpy as np
import torch

from foretell.kernels.native.library import SAMPLING_ROW
from foretell.sampling import noise
from foretell.sampling.cuda_sampler import SamplingBatch, pack_settings
from foretell.sampling.native_sampler import pack_sampling_rows
from foretell.sampling_params import SamplingParams


def test_keys_are_those_the_definition_adds_its_lanes_to() -> None:
    seeds, positions = [0, 1, -5, 2**63 - 1], [0, 7, 2**40, 3]
    lanes = torch.zeros(1, dtype=torch.int64)
    bits = noise._bits(torch.tensor(seeds), torch.tensor(positions), 3, lanes)[:, 0]
    last = noise._scramble(torch.from_numpy(noise.keys(seeds, positions, 3))) & ((1 << 52) - 1)
    assert last.tolist() == bits.tolist()
    each = [noise.key(seed, position, 3) for seed, position in zip(seeds, positions, strict=True)]
    assert noise.keys(seeds * 8, positions * 8, 3).tolist() == each * 8, "one by one they are the same"


def test_rows_are_written_down_as_the_library_reads_them() -> None:
    one, other = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.1), SamplingParams(temperature=1)
    params, keys = [one, one, other, one], noise.keys([3, 3, 4, 3], [10, 11, 11, 12]).tolist()
    assert min(keys) < 0 < max(keys), "both signs"
    found = pack_sampling_rows(params, keys)
    for row, each, key in zip(np.frombuffer(found, SAMPLING_ROW), params, keys, strict=True):
        assert row.tolist() == (each.temperature, each.top_p, each.min_p, each.top_k, key)
    assert pack_sampling_rows(params, noise.words([3, 3, 4, 3], [10, 11, 11, 12])) == found


def test_settings_are_laid_out_as_the_kernel_reads_them() -> None:
    params = [SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.1), SamplingParams(temperature=0.0)]
    words = pack_settings(SamplingBatch(params, [3, 4], [10, 11]))
    assert words.shape == (2, 3)
    assert words[:, 0].tolist() == noise.keys([3, 4], [10, 11]).tolist()
    floats = torch.from_numpy(words).view(torch.float32)[:, 2:]
    torch.testing.assert_close(floats, torch.tensor([[0.7, 0.9, 0.1, 40.0], [0.0, 1.0, 0.0, 0.0]]))
