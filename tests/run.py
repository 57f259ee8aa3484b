"""Runs the tests in two processes at once: `python -m tests.run [arguments of pytest]`.

Most tests keep one core busy, and small machines have two. Each process takes whole folders, so that servers and models
that tests share are started once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = (  # about half of the time
    *("attack", "bench", "certify", "cli", "cluster", "kernels_triton"),
    *("packaging", "program", "server", "train", "tune"),
)


def main(arguments: list[str]) -> int:
    """Print the output of each half when it ends; return the first exit code that is not 0."""
    first = [f"tests/{folder}" for folder in FIRST]
    second = [f"--ignore={folder}" for folder in first]
    with tempfile.TemporaryFile("w+") as later:
        command = [sys.executable, "-m", "pytest", *arguments]
        other = subprocess.Popen([*command, *first], cwd=ROOT, stdout=later, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run([*command, *second], cwd=ROOT).returncode
            other.wait()
        finally:
            if other.poll() is None:
                other.terminate()
                other.wait()
        later.seek(0)
        print(later.read(), flush=True)
    return code or other.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
