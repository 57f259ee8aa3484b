"""Records that are made in every step lie in memory as those that ctypes makes."""

from __future__ import annotations

import ctypes

import pytest

from foretell.kernels.native.records import ALL_REDUCE, DraftChainRecord, HeadPrefillRecord, StepRecord, pack_record


@pytest.mark.parametrize("kind", [StepRecord, DraftChainRecord, HeadPrefillRecord])
def test_a_record_of_numbers_is_the_record(kind: type[ctypes.Structure]) -> None:
    fields = [None if not at % 3 else at << 40 for at in range(len(kind._fields_))]
    slow = kind()
    for (name, what), value in zip(kind._fields_, fields, strict=True):
        setattr(slow, name, what(value or 0) if what is ALL_REDUCE else value or 0)
    assert pack_record(kind, *fields).tobytes() == bytes(slow)
