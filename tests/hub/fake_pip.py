"""Stands in for pip: copies ready wheels, slowly or not at all, as a script in the environment says."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[sys.argv.index("--dest") + 1])
    with open(os.environ["FAKE_PIP_CALLS"], "a") as calls:
        calls.write(" ".join(sys.argv[1:]) + f" TMPDIR={os.environ['TMPDIR']}\n")
    if words := os.environ.get("FAKE_PIP_FAILS"):
        sys.exit(f"Looking in indexes: somewhere\n{words}")
    (folder / "half").write_bytes(b"half a wheel")
    wait_for_sign()
    for wheel in Path(os.environ["FAKE_PIP_WHEELS"]).glob("*.whl"):
        shutil.copy(wheel, folder / wheel.name)


def wait_for_sign() -> None:
    """Wait for a file, if one is named, but not forever: its writer may be gone."""
    sign, until = os.environ.get("FAKE_PIP_WAITS_FOR"), time.monotonic() + 120
    while sign and not os.path.exists(sign) and time.monotonic() < until:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
