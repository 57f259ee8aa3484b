"""Records that are made in every step lie in memory as those that ctypes makes."""

from __future__ import annotations

import ctypes

import pytest

from foretell.kernels.native.records import JOIN, ChainRecord, ReadingRecord, StepRecord, record_of


@pytest.mark.parametrize("kind", [StepRecord, ChainRecord, ReadingRecord])
def test_a_record_of_numbers_is_the_record(kind: type[ctypes.Structure]) -> None:
    fields = [None if not at % 3 else at << 40 for at in range(len(kind._fields_))]
    slow = kind()
    for (name, what), value in zip(kind._fields_, fields, strict=True):
        setattr(slow, name, what(value or 0) if what is JOIN else value or 0)
    assert record_of(kind, *fields).tobytes() == bytes(slow)
