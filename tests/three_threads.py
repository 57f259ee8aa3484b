"""A pytest plugin: every test runs with three threads, so that the native pool has workers."""

from __future__ import annotations

import pytest
import torch

THREADS = 3


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.set_num_threads(THREADS)
