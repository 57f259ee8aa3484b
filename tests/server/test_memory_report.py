"""The memory report of a server."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from foretell.config import EngineConfig
from foretell.runner.memory_plan import MemoryPlan
from foretell.server.memory_report import GIB, LOGIT_COPIES, MemoryReport, activation_bytes, process_memory
from foretell.utils.system import trim_memory
from tests.tiny import CONFIG, World

PLAN = MemoryPlan(weights=3 * GIB, drafter=GIB, page_bytes=GIB // 4, pages=8)


def assembly(device: str = "cpu") -> Any:
    runner = SimpleNamespace(model=World().engine().runner.model, device=torch.device(device))
    return SimpleNamespace(memory=PLAN, engine=SimpleNamespace(runner=runner), corpus=None)


def status(folder: Path, now: int, peak: int) -> Path:
    (folder / "status").write_text(f"Name:\tpython\nVmHWM:\t{peak // 1024} kB\nVmRSS:\t{now // 1024} kB\n")
    return folder


def test_the_total_is_resident_memory_and_future_memory(tmp_path: Path) -> None:
    found = MemoryReport.measure(assembly(), EngineConfig(), status(tmp_path, now=5 * GIB, peak=5 * GIB))
    assert found.process == 5 * GIB - PLAN.weights - PLAN.drafter, "resident memory without the weights"
    assert found.total == PLAN.total + found.activations + found.process
    assert str(found).startswith(
        "at most 8.00 GiB: weights 3.00 GiB, drafter 1.00 GiB"
    ) and "cache of 8 pages 2.00 GiB" in str(found)
    assert "process 1.00 GiB" in str(found)


def test_the_total_is_no_less_than_the_peak_while_loading(tmp_path: Path) -> None:
    found = MemoryReport.measure(assembly(), EngineConfig(), status(tmp_path, now=5 * GIB, peak=9 * GIB))
    assert found.total == 9 * GIB


def test_what_a_draft_corpus_may_grow_by_is_announced(tmp_path: Path) -> None:
    plain = MemoryReport.measure(assembly(), EngineConfig(), status(tmp_path, now=5 * GIB, peak=5 * GIB))
    with_corpus = assembly()
    with_corpus.corpus = SimpleNamespace(max_growth=GIB)
    found = MemoryReport.measure(with_corpus, EngineConfig(), status(tmp_path, now=5 * GIB, peak=5 * GIB))
    assert found.total == plain.total + GIB


def test_on_a_device_the_program_is_not_in_the_same_memory(tmp_path: Path) -> None:
    found = MemoryReport.measure(assembly("cuda"), EngineConfig(), status(tmp_path, now=5 * GIB, peak=9 * GIB))
    assert found.total == PLAN.total + found.activations and "the program" not in str(found)


def test_resident_and_file_backed_memory_are_reported(tmp_path: Path) -> None:
    with (status(tmp_path, now=5 * GIB, peak=5 * GIB) / "status").open("a") as file:
        file.write(f"RssFile:\t{2 * GIB // 1024} kB\n")
    found = MemoryReport.measure(assembly(), EngineConfig(), tmp_path)
    assert str(found).endswith("; resident now 5.00 GiB, 2.00 GiB of it file-backed")


def test_the_report_works_without_proc(tmp_path: Path) -> None:
    found = MemoryReport.measure(assembly(), EngineConfig(), tmp_path)
    assert found.process == 0 and found.total == PLAN.total + found.activations


def test_activations_grow_with_rows_and_sequences() -> None:
    few, rows, sequences = (
        activation_bytes(assembly(), EngineConfig(max_num_batched_tokens=batched, max_num_seqs=seqs))
        for batched, seqs in ((64, 8), (128, 8), (64, 16))
    )
    assert rows > few and sequences - few == 8 * LOGIT_COPIES * CONFIG.vocab * 4


def test_activations_grow_with_the_kv_cache() -> None:
    one, two = assembly(), assembly()
    two.memory = replace(PLAN, pages=2 * PLAN.pages)
    assert activation_bytes(two, EngineConfig()) - activation_bytes(one, EngineConfig()) == PLAN.cache // CONFIG.layers


def test_memory_of_loading_is_returned_to_the_system() -> None:
    left = [np.ones(1 << 16, np.uint8) for _ in range(1024)]  # small enough to be kept by the C library
    keep = np.ones(1 << 16, np.uint8)
    before = process_memory().now
    left.clear()
    trim_memory()
    after = process_memory().now
    assert before - after > 32 << 20 and keep.all()


def test_a_process_knows_its_own_memory() -> None:
    before = process_memory().now
    taken = np.ones(64 << 20, np.uint8)
    after = process_memory()
    assert after.now - before > 0.9 * taken.nbytes and after.peak >= after.now > after.files > 0
    assert process_memory(Path(f"/proc/{os.getpid()}")).peak >= after.peak
