"""Free memory, and the memory plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretell.errors import CapacityError
from foretell.models.draft_heads import EagleConfig, HeadConfig, LayerConfig
from foretell.runner import memory_plan as memory
from foretell.runner.heads.kv import head_layer_shapes
from foretell.runner.memory_plan import (
    GIB,
    HeadLimits,
    MemoryNeeds,
    available_memory,
    cgroup_memory,
    device_memory,
    graph_workspace,
    head_workspace,
    plan_memory,
    step_workspace,
)

NEEDS = MemoryNeeds(weights=GIB, drafter=0, page_bytes=3_000_000, page_size=16, context=1000, max_num_seqs=8)


def write_group(folder: Path, limit: object, used: object, stat: str | None = None) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)
    return folder


def test_cached_files_count_as_free(tmp_path: Path) -> None:
    stat = "anon 300\nfile 500\ninactive_file 400\nactive_file 50\nslab 7\n"
    assert cgroup_memory(write_group(tmp_path, 1000, 800, stat)) == 1000 - (800 - 450)


@pytest.mark.parametrize("stat", [None, "", "odd\n", "inactive_file many\n", "anon 300\n"])
def test_a_cgroup_without_counts_is_used_as_is(tmp_path: Path, stat: str | None) -> None:
    assert cgroup_memory(write_group(tmp_path, 1000, 800, stat)) == 200


@pytest.mark.parametrize(("used", "stat", "left"), [(1200, "", 0), (100, "active_file 900\n", 1000)])
def test_the_free_memory_of_a_cgroup_is_between_0_and_its_limit(
    tmp_path: Path, used: int, stat: str, left: int
) -> None:
    assert cgroup_memory(write_group(tmp_path, 1000, used, stat)) == left


def test_without_a_limit_the_memory_of_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def refusal(needs: MemoryNeeds, kv_memory: float | None, available: int = 8 * GIB) -> str:
    with pytest.raises(CapacityError) as caught:
        plan_memory(needs, available, kv_memory)
    return str(caught.value)


@pytest.mark.parametrize("page_bytes", [3_000, 3_000_000, 11_534_336, GIB // 4, GIB // 64 + 1])
def test_too_little_memory_for_a_page_names_the_minimum(page_bytes: int) -> None:
    needs = replace(NEEDS, page_bytes=page_bytes)
    message = refusal(needs, 1e-6, 99 * GIB)
    assert "max_model_len" not in message and "too small for one page of 16 tokens" in message
    (least,) = re.findall(r"raise it to (\d[\d.]*),", message)
    assert plan_memory(needs, 99 * GIB, float(least)).pages >= 63
    with pytest.raises(CapacityError):
        plan_memory(needs, 99 * GIB, float(least) - 0.01)


def test_memory_for_some_pages_names_the_context_they_hold() -> None:
    assert "set max_model_len to 48 or less" in refusal(NEEDS, 9_000_000 / GIB)
    assert plan_memory(replace(NEEDS, context=48), 8 * GIB, 9_000_000 / GIB).pages == 3


def test_on_a_gpu_the_kv_cache_takes_what_the_workspace_leaves() -> None:
    asked = replace(NEEDS, workspace=GIB, sequences=8, cache_fraction=1.0)
    roomy = plan_memory(asked, 40 * GIB, None)
    assert roomy.pages == 8 * 63, "enough for max_num_seqs sequences, and no more"
    tight = plan_memory(asked, 3 * GIB, None)
    assert tight.total <= 3 * GIB < tight.total + 2 * NEEDS.page_bytes
    assert "workspace 1.00 GiB" in str(tight)
    with pytest.raises(CapacityError, match="weights and workspace need 2.00 GiB, and 1.50 GiB is free; use"):
        plan_memory(asked, int(1.5 * GIB), None)
    with pytest.raises(CapacityError, match=r"utilization 0.3 of the free memory.; raise gpu_memory_utilizat"):
        plan_memory(replace(asked, utilization=0.3), int(1.5 * GIB), None)


def test_the_workspace_grows_with_tokens_and_vocabulary() -> None:
    small = step_workspace(1000, 100, 500, 2)
    assert step_workspace(1000, 200, 500, 2) - small == 1000 * 100 * 2
    assert step_workspace(1000, 100, 1500, 2) > small


LAYER = LayerConfig(width=64, heads=8, kv_heads=2, head_dim=8, ffn=96)
HEAD = EagleConfig(LAYER, 1000, 128, (0, 1, 2))
ASKED = HeadLimits(sequences=8, context=1000, tokens=256, depth=4, tree_width=10, page_size=16)


@pytest.mark.parametrize(
    "more",
    [
        {"sequences": 16},
        {"context": 5000},
        {"tokens": 512},
        {"depth": 40},
        {"tree_width": 20},
        {"page_size": 32},
    ],
)
def test_the_workspace_of_heads_grows_with_their_limits(more: dict[str, int]) -> None:
    def needed(asked: HeadLimits, config: HeadConfig = HEAD) -> int:
        return head_workspace(config, head_layer_shapes(config), asked, torch.bfloat16)

    assert needed(replace(ASKED, **more)) > needed(ASKED)
    assert needed(ASKED, replace(HEAD, draft_vocab=500)) < needed(ASKED)
    assert needed(ASKED, replace(HEAD, hidden_layers=(1, 2))) < needed(ASKED)


def test_the_page_copies_of_a_head_are_bounded() -> None:
    """It drafts for many long sequences in several passes."""
    of = [
        head_workspace(HEAD, head_layer_shapes(HEAD), replace(ASKED, sequences=count, context=32768), torch.bfloat16)
        for count in (64, 128)
    ]
    logits = 64 * ASKED.tree_width * HEAD.outputs * 4 * 2 * 6
    assert of[1] - of[0] < 2 * logits


def test_cuda_graphs_need_workspace() -> None:
    small = graph_workspace(512, 1000, 5000, 2)
    assert graph_workspace(512, 100_000, 5000, 2) > graph_workspace(512, 10_000, 5000, 2) > small
    assert graph_workspace(512, 1000, 9000, 2) > small
