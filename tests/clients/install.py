"""Installs clients from npm and PyPI, each into a folder of its own in the user's cache, once per version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LONG = 600  # seconds for one installation
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretell" / "test-clients"
DONE = "installed"  # a file that is written last


def npm_command(command: str, package: str, version: str, script: str = "") -> Path:
    """Install a package from npm and run its install script; return the path of its command, or skip the test."""
    folder = CACHE / "npm" / f"{package.replace('/', '_')}@{version}"
    if not (folder / DONE).exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        words = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@{version}"]
        folder.mkdir(parents=True, exist_ok=True)
        _install(f"{package} {version}", words, folder)
        if script:
            _install(f"{package} {version}", ["node", script], folder / "node_modules" / package)
        (folder / DONE).touch()
    return folder / "node_modules" / ".bin" / command


def python_with(name: str, *requirements: str) -> Path:
    """Install packages from PyPI into a virtual environment; return its interpreter, or skip the test."""
    folder = CACHE / "pypi" / "_".join((name, *requirements)).replace("/", "_")
    python = folder / "bin" / "python"
    if not (folder / DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        _install(name, [sys.executable, "-m", "venv", "--without-pip", str(folder)], Path.cwd())
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
        _install(name, [*pip, *requirements], Path.cwd())
        (folder / DONE).touch()
    return python


def _install(name: str, words: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LONG)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} was not installed within {LONG} s")
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        pytest.skip(f"{name} cannot be installed: {reason[0][:200]}")
