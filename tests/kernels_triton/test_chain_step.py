"""A chain step picks the token of its plain definition: the first argmax, with its probability, and the next row."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from torch import Tensor

from foretell.kernels.triton.chain_step import BLOCK, chain_step
from foretell.kernels.triton.row_tables import RowTables, StepShape
from foretell.sampling.cuda_sampler import SamplingBatch, pack_settings, sample_on_device
from foretell.sampling_params import SamplingParams
from tests.kernels_triton.test_forward import DEVICE

PAGE, SEQUENCES = 4, 3
POSITIONS, ENDS = (5, 8, 2), (12, 9, 4)  # the second has reached its end


def tables(sizes: StepShape, pages: Tensor) -> RowTables:
    return RowTables.over(torch.full((sizes.table_size,), -7, dtype=torch.int32, device=DEVICE), sizes, pages)


def picked(logits: Tensor, vocab: int, draws: SamplingBatch | None = None) -> tuple[Tensor, RowTables]:
    """Tokens and shares, and the rows that follow; before them the second sequence has two rows."""
    pages = torch.arange(SEQUENCES * 5, dtype=torch.int32, device=DEVICE).view(SEQUENCES, 5).flip(0)
    rows, following = (tables(StepShape(count, count, 16, 1), pages) for count in (4, SEQUENCES))
    rows.logit_rows[:SEQUENCES] = torch.tensor([0, 2, 3], device=DEVICE)
    rows.positions[:] = torch.tensor([POSITIONS[0], POSITIONS[1] - 1, POSITIONS[1], POSITIONS[2]], device=DEVICE)
    found = torch.zeros(2, SEQUENCES, device=DEVICE)
    ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    words = None if draws is None else torch.from_numpy(pack_settings(draws)).to(DEVICE)
    chain_step(logits.to(DEVICE)[:, :vocab], rows, ends, following, found, PAGE, words)
    return found.cpu(), following


@pytest.mark.parametrize("vocab", [3, 64, 700, BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_argmax_and_its_probability_are_the_definitions(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    logits = (4 * torch.randn(SEQUENCES, vocab + 9)).to(dtype)  # in bfloat16 many are equal
    logits[:, vocab:] = 90.0  # tokens that only the draft model has
    (tokens, sure), following = picked(logits, vocab)
    own = logits[:, :vocab].double()
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in own]
    assert following.tokens.tolist() == tokens.tolist()
    torch.testing.assert_close(sure.double(), own.softmax(-1).amax(-1), rtol=2e-6, atol=0)


@pytest.mark.parametrize("vocab", [3, 700, BLOCK + 9])
def test_what_is_drawn_is_what_is_chosen_and_its_share_is_of_all_tokens(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = 3 * torch.randn(SEQUENCES, vocab + 9)
    logits[:, vocab:] = 90.0
    for temperatures in ((1.0, 0.0, 0.3), (1e-9, 2.0, 1.0)):
        draws = SamplingBatch(
            [SamplingParams(temperature=temperature, top_k=40) for temperature in temperatures],
            [7, -1, 1 << 62],
            [0, 5, 9],
        )
        (tokens, sure), following = picked(logits, vocab, draws)
        assert tokens.tolist() == sample_on_device(logits[:, :vocab].to(DEVICE), draws) == following.tokens.tolist()
        divisor = torch.tensor(
            [[max(temperature, 1e-6) if temperature else 1.0] for temperature in temperatures], dtype=torch.float64
        )
        shares = (logits[:, :vocab].double() / divisor).softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
        torch.testing.assert_close(sure.double(), shares, rtol=1e-5, atol=0)


@pytest.mark.parametrize("left", [[0], [BLOCK - 1], [7, BLOCK + 7, 2 * BLOCK + 7], [2 * BLOCK + 30, 31]])
def test_the_forbidden_weigh_nothing_and_of_equals_the_first_is_taken(left: list[int]) -> None:
    """Some lanes meet nothing, some one token, some the same score again and again."""
    logits = torch.full((SEQUENCES, 2 * BLOCK + 100), float("-inf"))
    logits[:, left] = -3.0
    (tokens, sure), _ = picked(logits, logits.shape[1])
    assert tokens.tolist() == [min(left)] * SEQUENCES
    torch.testing.assert_close(sure, torch.full((SEQUENCES,), 1 / len(left)))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[-1e30, 3e4, -3e4], [1e38, -1e38, 1e38], [-200.0, -200.0, -201.0]])
    (tokens, sure), _ = picked(logits, 3)
    assert tokens.tolist() == [1, 0, 0]
    torch.testing.assert_close(sure.double(), logits.double().softmax(-1).amax(-1), rtol=2e-6, atol=0)


def test_the_next_row_of_each_sequence_follows_its_last_one() -> None:
    _, rows = picked(torch.randn(SEQUENCES, 50), 50)
    positions = [position + 1 for position in POSITIONS]
    runs = [position < end for position, end in zip(positions, ENDS, strict=True)]
    assert runs == [True, False, True]
    assert rows.positions.tolist() == positions
    assert rows.key_limits.tolist() == [position + 1 for position in positions]
    assert rows.visible_keys.tolist() == [(position + 1) * on for position, on in zip(positions, runs, strict=True)]
    assert rows.logit_rows.tolist() == [0, 1, 2]
    pages = rows.pages.tolist()
    slots = [pages[i][position // PAGE] * PAGE + position % PAGE for i, position in enumerate(positions)]
    assert rows.slots.tolist() == [slot if on else -1 for slot, on in zip(slots, runs, strict=True)]
    for i, tile in enumerate(rows.tiles.tolist()):
        assert tile == [i, 1, i, (positions[i] + 1) * runs[i], 0, positions[i] + 1]
