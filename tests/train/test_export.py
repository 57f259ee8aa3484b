"""An exported head that is loaded again has the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.cli.main import main
from foretell.hub import open_checkpoint
from foretell.hub.checkpoint import folder_tensors
from foretell.models.draft_heads import TargetWeights, read_head
from foretell.models.draft_heads.formats import load_foreign
from foretell.models.load import load_model
from tests.folder import write_tiny_folder

ROWS = "\n".join(json.dumps({"prompt": f"The quick brown fox {i}"}) for i in range(6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_tiny_folder(folder / "model")
    (folder / "data.jsonl").write_text(ROWS)
    for kind in ("eagle", "medusa"):
        line = ["train", kind, "--target", str(folder / "model"), "--data", str(folder / "data.jsonl")]
        more = ["--steps", "3", "--max-tokens", "16", "--context", "64", "--draft-vocab", "80", "--no-measure"]
        assert main([*line, "--out", str(folder / kind), *more]) == 0
    return folder


def logits_of(head: Any, model: Any) -> torch.Tensor:
    head.share_weights(TargetWeights.of(model))
    head.prepare(32)
    torch.manual_seed(0)
    tokens, hidden = torch.randint(0, 80, (1, 9)), torch.randn(1, 9, len(head.config.hidden_layers) * 32)
    states = head.step(tokens, head.fuse(hidden), head.rope_rows(torch.arange(9)), lambda layer, q, k, v: q)
    logits: torch.Tensor = head.logits(states)
    return logits


@pytest.mark.parametrize("form", ["speculators", "eagle3"])
def test_export_and_load(form: str, folder: Path) -> None:
    line = ["export", str(folder / "eagle"), "--target", str(folder / "model"), "--format", form]
    assert main([*line, "--out", str(folder / form)]) == 0
    model = load_model(open_checkpoint(folder / "model"))
    config = json.loads((folder / form / "config.json").read_text())
    back = load_foreign(form, config, folder_tensors(folder / form), model.config)
    mine = read_head(folder / "eagle")
    assert torch.equal(back.draft_ids, mine.draft_ids) and back.config.hidden_layers == mine.config.hidden_layers
    torch.testing.assert_close(logits_of(back, model), logits_of(mine, model))


def test_other_head_kinds_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["export", str(folder / "medusa"), "--target", str(folder / "model"), "--format", "eagle3"]
    assert main([*line, "--out", str(folder / "no")]) == 2
    assert "is a medusa head" in capsys.readouterr().err
