"""Imports only point down: the table of allowed imports between layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "foretell"
BASE = {
    "types",
    "sampling_params",
    "structured_output",
    "config",
    "vllm_config",
    "errors",
    "options",
    "outputs",
    "tokenizer",
    "utils",
}
ALLOWED: dict[str, set[str]] = {
    "version": set(),
    "utils": set(),
    "__init__": {"llm", "outputs", "sampling_params", "utils", "types", "version"},
    "__main__": {"cli"},
    "errors": set(),
    "options": {"errors"},
    "structured_output": {"errors"},
    "sampling_params": {"errors", "options", "structured_output"},
    "types": {"sampling_params"},
    "config": {"errors", "options"},
    "vllm_config": {"config", "errors", "options"},
    "outputs": {"types", "engine"},  # the name of a type only; see test_the_values_need_no_torch
    "tokenizer": {"errors", "options"},
    "kernels": BASE,
    "hub": BASE,
    "kv": BASE | {"kernels"},
    "sampling": BASE | {"kernels"},
    "models": BASE | {"kernels", "hub", "kv"},
    "runner": BASE | {"kernels", "kv", "models", "sampling"},
    "tensor_parallel": BASE | {"hub", "kernels", "models", "runner"},
    "verify": BASE | {"sampling"},
    "control": BASE,
    "draft": BASE | {"runner", "models", "sampling", "kv", "hub"},
    "engine": BASE | {"kv", "sampling", "runner", "draft", "verify", "control"},
    "build": BASE
    | {"hub", "kernels", "kv", "sampling", "models", "runner", "draft", "verify", "control", "engine"}
    | {"tensor_parallel"},
    "llm": BASE | {"build", "engine", "draft"},
    "program": BASE | {"llm", "engine", "sampling"},
    "server": BASE | {"build", "engine", "control", "version", "hub"},
    "cluster": BASE | {"server"},
    "bench": BASE | {"llm", "build", "engine", "draft"},
    "plan": BASE | {"models", "hub"},  # sizes in configs; without torch
    "tune": BASE | {"bench", "llm", "build", "draft"},
    "certify": BASE | {"llm", "engine", "draft", "control", "verify", "sampling", "models", "kv", "runner"},
    "train": BASE
    | {"llm", "build", "engine", "models", "runner", "kv", "kernels", "draft", "certify", "sampling", "hub", "version"}
    | {"server"},  # logged chats are rendered as they were served
    "cli": BASE
    | {"plan", "tune", "train", "models", "cluster", "control", "llm", "hub", "bench", "certify", "server", "build"}
    | {"__init__", "engine", "draft"},
}


def test_imports_only_point_down() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        for name in imported(path) - ALLOWED[layer(path)] - {layer(path)}
    ]
    assert not wrong


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return the layers a file imports from."""
    names: set[str] = set()
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = absolute(node, path, depth)
            if module == "foretell":
                names |= {alias.name if (PACKAGE / alias.name).exists() else "__init__" for alias in node.names}
            elif module.startswith("foretell."):
                names.add(module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("foretell.")}
    return names


def absolute(node: ast.ImportFrom, path: Path, depth: int) -> str:
    if node.level == 0:
        return node.module or ""
    parts = ["foretell", *path.relative_to(PACKAGE).parts[: depth - node.level]]
    return ".".join([*parts, *([node.module] if node.module else [])])


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_starts_without_torch() -> None:
    assert not loaded_by("import foretell.cli.main") & {"torch", "numpy", "transformers", "tokenizers"}


def test_programs_for_a_server_need_no_torch() -> None:
    assert not loaded_by("from foretell import program") & {"torch", "numpy", "httpx", "rich", "fastapi"}


def test_the_values_need_no_torch() -> None:
    assert "torch" not in loaded_by("import foretell.types, foretell.config, foretell.outputs, foretell.hub")


def test_the_controller_needs_no_torch() -> None:
    files = [path.stem for path in (PACKAGE / "control").glob("*.py") if path.stem != "__init__"]
    assert "torch" not in loaded_by(f"import {', '.join(f'foretell.control.{name}' for name in files)}")


def test_the_engine_needs_nothing_of_the_server() -> None:
    extras = {"fastapi", "uvicorn", "pydantic", "typer", "rich", "huggingface_hub", "transformers", "prometheus_client"}
    assert not loaded_by("import foretell.llm") & extras


def test_no_caller_asks_which_drafter_it_holds() -> None:
    asks = re.compile(r"isinstance\([^)]*\b[A-Z]\w+Drafter\b")  # `Drafter` itself: is it one at all
    callers = [path for path in PACKAGE.rglob("*.py") if layer(path) != "draft"]
    found = [f"{path}: {line}" for path in callers for line in path.read_text().splitlines() if asks.search(line)]
    assert all("else isolate(drafter)" in line for line in found), "a mix of drafters is no kind of drafter"
