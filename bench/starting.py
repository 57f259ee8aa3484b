"""From the start of a process to the first token and to /ready, with and without packed weights on disk.

PYTHONPATH=another checkout measures that one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from foretell.utils.system import cpu_name, home, usable_cores

PATIENCE = 120.0  # seconds
PROMPT = "Say hi"
COMMAND = (sys.executable, "-m", "foretell")


def first_token(model: str, env: dict[str, str]) -> dict[str, float]:
    """Seconds until `foretell generate` has written something."""
    began = time.perf_counter()
    words = (*COMMAND, "generate", PROMPT, "--max-tokens", "1", "--model", model)
    home = env["FORETELL_HOME"]  # to start there: another folder may have a `foretell` of its own
    with subprocess.Popen(words, env=env, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None, "it was asked for"
        process.stdout.read(1)
        return {"seconds": time.perf_counter() - began}


def ready(model: str, env: dict[str, str]) -> dict[str, float]:
    """Seconds until `foretell serve` says it is ready, and its memory then, in MB."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    words = (*COMMAND, "serve", model, "--port", str(port))
    home = env["FORETELL_HOME"]
    with subprocess.Popen(words, env=env, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not _answers(port):
                if process.poll() is not None or time.perf_counter() - began > PATIENCE:
                    raise RuntimeError(f"{' '.join(words)} did not become ready")
                time.sleep(0.01)
            return {"seconds": time.perf_counter() - began} | _memory(process.pid)
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _memory(process: int) -> dict[str, float]:
    """What is resident, the part of it that lies in files, and the most there was."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return {}
    names = {"VmRSS": "resident", "RssFile": "of files", "VmHWM": "most"}
    return {names[name]: int(size) / 1024 for name, size in re.findall(r"^(VmRSS|RssFile|VmHWM):\s+(\d+)", text, re.M)}


def measure(run: Callable[[], dict[str, float]], folder: Path, runs: int) -> dict[str, dict[str, list[float]]]:
    """Cold: nothing is kept. Warm: all that a start keeps is there. In turn."""
    found: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
    for _ in range(runs):
        shutil.rmtree(folder, ignore_errors=True)
        for state, figures in found.items():
            for name, figure in run().items():
                figures.setdefault(name, []).append(figure)
            print(f"  {state} {figures['seconds'][-1]:.2f} s", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a built-in model that was fetched")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    result: dict[str, object] = {"model": args.model, "processor": cpu_name(), "cores": usable_cores()}
    with tempfile.TemporaryDirectory() as place:
        for kept in ("models", "native"):  # all but packed weights is as it ever was
            os.symlink(home() / kept, Path(place) / kept)
        env = os.environ | {"FORETELL_HOME": place}
        for name, run in {"generate": first_token, "serve": ready}.items():
            found = measure(partial(run, args.model, env), Path(place) / "packed", args.runs)
            result[name] = found
            for state, figures in found.items():
                medians = ", ".join(f"{each} {statistics.median(all_):.2f}" for each, all_ in figures.items())
                print(f"{name:9} {state:5} {medians}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
