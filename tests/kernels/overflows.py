"""Calls that would make native code write outside of its arrays: run as a program, print which ones are refused."""

from __future__ import annotations

from collections.abc import Callable

import torch

from foretell.kernels.attention import Span
from foretell.kernels.bounds import BoundsError
from foretell.kernels.native.library import SAMPLING_ROW, Library, library
from foretell.kernels.native.packed import PackedLinear
from foretell.kernels.native.records import StepRecord, pack_record
from foretell.kv.cache import slots_of
from foretell.runner.batch_layout import BatchLayout, pack
from foretell.runner.native.head_draft import DraftRequest, NativeBlock, NativeChain
from foretell.sampling_params import SamplingParams
from foretell.types import Draft, Request, ScheduledSequence, Sequence
from tests.heads.test_native import waiting
from tests.kernels.test_quant import random_weights
from tests.runner.test_native import PLAIN, harness
from tests.tiny import HEADS

SCORES = torch.zeros(4, 100)


def native() -> Library:
    found = library()
    if found is None:
        raise RuntimeError("no C++ compiler is here")
    return found


def draws_for_too_few_rows() -> None:
    native().sample(SCORES, bytes(3 * SAMPLING_ROW.itemsize))


def odds_of_too_few_ids() -> None:
    native().race_topk(SCORES, torch.arange(99), bytes(4 * SAMPLING_ROW.itemsize), 5)


def more_than_64_of_a_row() -> None:
    native().topk(SCORES, 65)


def rows_of_another_width() -> None:
    PackedLinear(native(), random_weights(8, 64, 32))(torch.zeros(1, 63))


def a_record_without_a_field() -> None:
    pack_record(StepRecord, 0)


def slots_past_the_pages() -> None:
    slots_of([0, 1], 4, 3, 9)


def a_draft_past_the_pages() -> None:
    seq = Sequence(0, Request("x", (1, 2, 3), SamplingParams(), 0, 9), [1, 2, 3], pages=[0])
    pack([ScheduledSequence.of(seq, 3)], [Draft.chain([4, 5])], 4)


def a_slot_past_the_cache() -> None:
    runner = harness(PLAIN).runner
    slots = len(runner.cache.keys[0]) * runner.cache.page_size
    runner.executor.forward(BatchLayout([1], [0], [slots], [Span(0, 1, 0, (0,))], [0]), ())


def a_token_past_the_vocabulary() -> None:
    harness(PLAIN).runner.executor.forward(BatchLayout([PLAIN.vocab], [0], [0], [Span(0, 1, 0, (0,))], [0]), ())


def a_head_past_the_pages() -> None:
    drafter, _ = waiting(HEADS["eagle"], temperature=0.0)
    if not isinstance(drafter._native, NativeChain):
        raise TypeError("an EAGLE head runs natively")
    asked = DraftRequest(tokens=[1], positions=[3], pages=[[0]], depths=[2], min_probabilities=[0.0])
    drafter._native.draft(asked, torch.zeros(1, drafter.head.config.layer.width))


def more_blocks_than_spare_slots() -> None:
    drafter, _ = waiting(HEADS["block"], temperature=0.0)
    if not isinstance(drafter._native, NativeBlock):
        raise TypeError("a block head runs natively")
    count = drafter._native.max_sequences + 1
    drafter._native.draft(DraftRequest([1] * count, [1] * count, [[0]] * count, [1] * count, [0.0] * count))


OVERFLOWS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        draws_for_too_few_rows,
        odds_of_too_few_ids,
        more_than_64_of_a_row,
        rows_of_another_width,
        a_record_without_a_field,
        slots_past_the_pages,
        a_draft_past_the_pages,
        a_slot_past_the_cache,
        a_token_past_the_vocabulary,
        a_head_past_the_pages,
        more_blocks_than_spare_slots,
    )
}


def main() -> None:
    for name, call in OVERFLOWS.items():
        try:
            call()
        except BoundsError:
            print(name)


if __name__ == "__main__":
    main()
