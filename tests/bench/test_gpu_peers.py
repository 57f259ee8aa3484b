"""The comparison with vLLM, with a stub for vLLM: engines that respond, fail and are late."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from foretell.models.config import ModelConfig
from foretell.models.decoder import Decoder

BENCH = Path(__file__).parents[2] / "bench"
# It writes token 7 in no time; with 3 tokens of a draft model it cannot be loaded, with 4 it fails.
STAND_IN = """
import types
__version__ = "0.0"
def TokensPrompt(prompt_token_ids): return prompt_token_ids
def SamplingParams(**params): return types.SimpleNamespace(**params)
class LLM:
    def __init__(self, **settings):
        speculative = settings.get("speculative_config") or {}
        self.tokens = speculative.get("num_speculative_tokens") if speculative.get("method") == "draft_model" else 0
        if self.tokens == 3: raise MemoryError("no room for the cache")
        mode = types.SimpleNamespace(cudagraph_mode=types.SimpleNamespace(name="FULL"))
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(compilation_config=mode))
    def collective_rpc(self, ask):
        return [ask(types.SimpleNamespace(model_runner=None))]
    def get_metrics(self):
        return [types.SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=0)]
    def generate(self, prompts, params, use_tqdm):
        print("words on standard output")
        if self.tokens == 4: raise ValueError("a step failed")
        times = types.SimpleNamespace(first_token_ts=1.0, last_token_ts=2.0)
        text = types.SimpleNamespace(token_ids=[7] * params.max_tokens)
        return [types.SimpleNamespace(metrics=times, outputs=[text]) for _ in prompts]
"""


def test_what_answers_is_in_the_tables_and_what_does_not_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "vllm.py").write_text(STAND_IN)
    (overlay / "safetensors.py").write_text("raise ImportError('our own engine sees what is meant for vLLM')")
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", str(BENCH.parent))
    words = f"--device cpu --folder {folder} --draft {folder} --vllm-path {overlay} --texts 2 --tokens 8 --longest 128"
    out = tmp_path / "out.txt"
    importlib.import_module("gpu_peers").main([*words.split(), "--rounds", "1", "--out", str(out)])
    reported = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
    measured = {(each["engine"], each["way"], each["cell"]) for each in reported if "way" in each}
    ways = ("plain", "draft, 4 tokens", "draft", "n-gram", "auto", "auto and draft")
    assert {("foretell", way, cell) for way in ways for cell in ("batch 1", "batch 1, T=1")} <= measured
    assert {(name, "plain", "batch 32") for name in ("foretell", "vllm plain")} <= measured
    assert ("vllm draft 2", "plain", "batch 1") in measured and ("vllm n-gram 3", "plain", "batch 1") in measured
    assert all(
        each["same"] == 1 for each in reported if each.get("engine") == "foretell" and each.get("way") in ways[1:]
    )
    lost = {each["engine"]: each["lost"] for each in reported if "lost" in each}
    assert set(lost) == {"vllm draft 3", "vllm draft 4"}
    assert "ended with 1" in lost["vllm draft 3"] and "a step failed" in lost["vllm draft 4"]
    assert "no room for the cache" in capsys.readouterr().err
    table = [line for line in out.read_text().splitlines() if line.startswith("|")]
    assert sum(">= 0.97" in line and line.count("| |") == 0 for line in table) == 1, "both sides of a ratio are there"


def test_an_engine_that_is_late_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    children = importlib.import_module("engine_child")
    child = children.Child("late", [sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log")
    with pytest.raises(children.Lost, match="nothing after"):
        child.wait_ready(0.1)
    assert child.has_ended


def test_a_coarse_copy_has_few_values_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    inflater = importlib.import_module("inflate")
    config = ModelConfig(
        vocab=64, width=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn=96, context=32, norm_eps=1e-5
    )
    torch.manual_seed(0)
    model, fine = Decoder(config).to(torch.bfloat16), Decoder(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    fine.load_state_dict(model.state_dict())
    inflater.coarsen(model, 4)
    for name, weight in model.named_parameters():
        own = fine.get_parameter(name)
        if name.startswith("blocks.") and weight.dim() == 2:
            groups = weight.reshape(-1, inflater.GROUP)
            assert max(len(group.unique()) for group in groups) <= 15
            error = (groups - own.reshape(groups.shape)).abs().amax(1).float()
            assert (error <= groups.abs().amax(1).float() * (0.5 / 7 + 0.01)).all()
        else:
            assert torch.equal(weight, own)
