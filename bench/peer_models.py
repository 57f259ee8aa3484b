"""The models that `peers.py` compares: the built-in one, or a synthetic 1.1B model with a draft model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BASE = "smollm2-135m"
WIDENED = ("--times", "3", "--layers", "30")  # every unit three times: 1.1 billion weights
COARSE = ("--times", "1", "--layers", "30", "--bits", "4")  # the base with weights of 4 bits, which drafts well


@dataclass(frozen=True)
class Subject:
    """One model in the formats of every engine, and its draft model, if it has one."""

    gguf: Path
    formats: tuple[str, ...]  # of llama.cpp
    quantizations: tuple[str, ...]  # ours
    model: str | None = None  # ours; None: the built-in one
    draft: str | None = None
    draft_gguf: Path | None = None


def synthetic(folder: Path, source: Path) -> Subject:
    """Make the synthetic model, its draft model and their GGUF files in the folder, where they are missing.

    `source` is a checkout of llama.cpp, whose converter needs transformers.
    """
    target = _inflated(folder / "synthetic-1.1b", WIDENED)
    draft = _inflated(folder / "draft-135m-4bit", COARSE)
    return Subject(
        gguf=_converted(target, source),
        formats=("Q8_0", "Q4_K_M"),
        quantizations=("int8", "int4"),
        model=str(target),
        draft=str(draft),
        draft_gguf=_converted(draft, source),
    )


def _inflated(folder: Path, how: tuple[str, ...]) -> Path:
    if not folder.exists():
        _run([sys.executable, str(HERE / "inflate.py"), str(folder), "--base", BASE, "--device", "cpu", *how])
    return folder


def _converted(folder: Path, source: Path) -> Path:
    path = folder.parent / f"{folder.name.replace('.', '_')}.bf16.gguf"
    if not path.exists():
        converter = source / "convert_hf_to_gguf.py"
        _run([sys.executable, str(converter), str(folder), "--outtype", "bf16", "--outfile", str(path)])
    return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-600:]}")
