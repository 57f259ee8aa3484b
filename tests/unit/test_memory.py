"""What memory is free, and what is planned to lie in it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretell.errors import CapacityError
from foretell.runner import memory
from foretell.runner.memory import GIB, Needs, available_memory, device_memory, group_memory, plan_memory, step_bytes

NEEDS = Needs(weights=GIB, drafter=0, page_bytes=3_000_000, page_size=16, context=1000, max_num_seqs=8)


def write_group(folder: Path, limit: object, used: object, stat: str | None = None) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)
    return folder


def test_cached_files_count_as_free(tmp_path: Path) -> None:
    stat = "anon 300\nfile 500\ninactive_file 400\nactive_file 50\nslab 7\n"
    assert group_memory(write_group(tmp_path, 1000, 800, stat)) == 1000 - (800 - 450)


@pytest.mark.parametrize("stat", [None, "", "odd\n", "inactive_file many\n", "anon 300\n"])
def test_a_group_without_counts_is_taken_at_its_word(tmp_path: Path, stat: str | None) -> None:
    assert group_memory(write_group(tmp_path, 1000, 800, stat)) == 200


@pytest.mark.parametrize(("used", "stat", "left"), [(1200, "", 0), (100, "active_file 900\n", 1000)])
def test_a_group_leaves_no_less_than_nothing_and_no_more_than_its_limit(
    tmp_path: Path, used: int, stat: str, left: int
) -> None:
    assert group_memory(write_group(tmp_path, 1000, used, stat)) == left


def test_without_a_limit_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_meminfo", lambda: {"MemAvailable": 600})
    assert available_memory(tmp_path) == 600
    assert available_memory(write_group(tmp_path, "max", 800)) == 600
    assert available_memory(write_group(tmp_path, 1000, 800)) == 200
    assert available_memory(write_group(tmp_path, 1000, 300)) == 600


def test_each_device_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (5, 9))[1])
    monkeypatch.setattr(memory, "available_memory", lambda: 7)
    assert device_memory("cuda:1") == device_memory(torch.device("cuda", 1)) == 5
    assert asked == [torch.device("cuda:1")] * 2
    assert device_memory("cpu") == device_memory(torch.device("cpu")) == 7


def refusal(needs: Needs, kv_memory: float | None, available: int = 8 * GIB) -> str:
    with pytest.raises(CapacityError) as caught:
        plan_memory(needs, available, kv_memory)
    return str(caught.value)


@pytest.mark.parametrize("page_bytes", [3_000, 3_000_000, 11_534_336, GIB // 4, GIB // 64 + 1])
def test_no_room_for_a_page_is_told_the_least_that_would_do(page_bytes: int) -> None:
    needs = replace(NEEDS, page_bytes=page_bytes)
    message = refusal(needs, 1e-6, 99 * GIB)
    assert "max_model_len" not in message and "even one page of 16 tokens" in message
    (least,) = re.findall(r"raise it to (\d[\d.]*),", message)
    assert plan_memory(needs, 99 * GIB, float(least)).pages >= 63
    with pytest.raises(CapacityError):
        plan_memory(needs, 99 * GIB, float(least) - 0.01)


def test_room_for_some_pages_is_told_how_long_a_text_they_hold() -> None:
    assert "set max_model_len to 48 or less" in refusal(NEEDS, 9_000_000 / GIB)
    assert plan_memory(replace(NEEDS, context=48), 8 * GIB, 9_000_000 / GIB).pages == 3


def test_on_a_gpu_steps_have_their_room_and_the_cache_takes_the_rest() -> None:
    asked = replace(NEEDS, workspace=GIB, texts=8, cache_share=1.0)
    roomy = plan_memory(asked, 40 * GIB, None)
    assert roomy.pages == 8 * 63, "as many texts as may be written at once, and no more"
    tight = plan_memory(asked, 3 * GIB, None)
    assert tight.total <= 3 * GIB < tight.total + 2 * NEEDS.page_bytes
    assert "steps 1.00 GiB" in str(tight)
    with pytest.raises(CapacityError, match="the weights need 2.00 GiB"):
        plan_memory(asked, int(1.5 * GIB), None)


def test_what_steps_work_with_grows_with_tokens_and_vocabulary() -> None:
    small = step_bytes(1000, 100, 500, 2)
    assert step_bytes(1000, 200, 500, 2) - small == 1000 * 100 * 2
    assert step_bytes(1000, 100, 1500, 2) > small
