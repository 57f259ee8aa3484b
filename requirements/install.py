"""Installs the project into the environment that runs this: locked where there is a lock, else as pyproject allows.

The lock is for Python 3.11 on Linux x86_64. Its packages come first, with their hashes and without dependencies, so
that torch finds all that it needs and no other package asks for torch: asked for by another package, pip may take a
build with gigabytes of CUDA.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parent
LOCKED = ((3, 11), "Linux", "x86_64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=["runtime", "dev"])
    parser.add_argument("--copy", action="store_true", help="install a copy of the package instead of a link to it")
    options = parser.parse_args()
    how = [] if options.copy else ["--quiet", "--editable"]  # quieter: setuptools warns of every editable install
    here = (sys.version_info[:2], platform.system(), platform.machine())
    try:
        locked(options.set, how) if here == LOCKED else unlocked(options.set, how)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


def locked(name: str, how: list[str]) -> None:
    """Install exactly the files that were tested."""
    pip("--require-hashes", "--no-deps", "--only-binary", ":all:", "--requirement", str(HERE / f"{name}.txt"))
    pip("--requirement", str(HERE / "torch.txt"))
    pip("--no-deps", "--no-build-isolation", *how, str(PROJECT))


def unlocked(name: str, how: list[str]) -> None:
    """Install the newest versions that pyproject allows."""
    version = platform.python_version()
    print(f"there is no lock for Python {version} on {platform.system()} {platform.machine()}: taking newest versions")
    dependencies = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    pip(next(each for each in dependencies if each.startswith("torch")))
    pip(*how, str(PROJECT) if name == "runtime" else f"{PROJECT}[{name}]")


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
