"""Writes the lock files: every package with its version and hash, for Python 3.11 on Linux x86_64.

`make lock` runs it. pip resolves pyproject.toml in an empty environment that holds torch alone, because the
build of torch differs between machines: a CPU build here, a CUDA build there. torch is pinned without a hash.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parent
SETS = {"runtime": [], "dev": ["dev"]}  # lock file -> extras
HEADER = "# Written by `make lock`: {}, for Python 3.11 on Linux x86_64. torch is in torch.txt.\n"
CUDA = ("nvidia-", "cuda-")


def main() -> int:
    if sys.version_info[:2] != (3, 11) or sys.platform != "linux":
        print("lock: run this with Python 3.11 on Linux x86_64, which the lock is for")
        return 1
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    torch = next(each for each in config["project"]["dependencies"] if each.startswith("torch"))
    backend = config["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        venv.create(Path(folder, "venv"), with_pip=False)
        pip(python, "install", "--quiet", "--no-deps", torch)
        (HERE / "torch.txt").write_text(f"torch=={installed(python).partition('+')[0]}\n")
        constraints = Path(folder, "constraints.txt")
        constraints.touch()
        for name in ("dev", "runtime"):  # the smaller set has the versions of the larger one
            found = resolve(python, Path(folder), [project(SETS[name]), *backend], constraints)
            if wrong := [each for each in found if each.startswith(CUDA)]:
                print(f"lock: put a CPU build of torch where pip finds it first; this one needs {wrong[0]}")
                return 1
            lines = [f"{each}=={version} \\\n    --hash=sha256:{hashed}\n" for each, (version, hashed) in found.items()]
            (HERE / f"{name}.txt").write_text(HEADER.format(f"the {name} set") + "".join(lines))
            constraints.write_text("".join(f"{each}=={version}\n" for each, (version, _) in found.items()))
            print(f"lock: {len(found)} packages in requirements/{name}.txt")
    return 0


def project(extras: list[str]) -> str:
    return f"{PROJECT}[{','.join(extras)}]" if extras else str(PROJECT)


def resolve(python: Path, folder: Path, wanted: list[str], constraints: Path) -> dict[str, tuple[str, str]]:
    """Return the version and the hash of every package that pip would install."""
    report = folder / "report.json"
    pip(
        python, "install", "--quiet", "--dry-run", "--only-binary", ":all:", "--report", str(report),
        "--constraint", str(constraints), *wanted,
    )  # fmt: skip
    found = {}
    for each in json.loads(report.read_text())["install"]:
        if "dir_info" not in each["download_info"]:
            found[canonical(each)] = (
                each["metadata"]["version"],
                each["download_info"]["archive_info"]["hashes"]["sha256"],
            )
    return dict(sorted(found.items()))


def canonical(package: dict[str, Any]) -> str:
    return str(package["metadata"]["name"]).lower().replace("_", "-").replace(".", "-")


def installed(python: Path) -> str:
    """Return the version of torch in the environment."""
    program = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    return subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def pip(python: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*command, *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
