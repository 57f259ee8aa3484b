"""Kernel, runner, head and sampling tests under sanitizers: `make sanitize`.

Builds the native library twice, with the address and undefined-behaviour sanitizers and with the thread sanitizer. For
each build first checks that planted faults are reported, then runs the tests. Exits with 1 after a report or a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from foretell.kernels.native.build import EXTRA_FLAGS_VARIABLE, BuildError, find_compiler

COMMON = "-O1 -g -fno-omit-frame-pointer -DFORETELL_FAULTS -Wl,-Bsymbolic"
BUILD = "from foretell.kernels.native.build import build_library; print(build_library())"
CALL = "import ctypes, sys; getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])(int(sys.argv[3]))"
# Two files build libraries of their own, and a sanitizer's operator new ends the process instead of failing.
LEFT_OUT = (
    "--ignore=tests/kernels/test_native.py",
    "--ignore=tests/kernels/test_allocation_failures.py",
    "--deselect=tests/runner/test_native.py::test_a_step_that_does_not_fit_in_memory_is_an_error_and_the_next_one_runs",
)
SHARED = (  # whose work is large enough for several threads
    "tests/kernels/test_quant.py",
    "tests/runner/test_native.py",
    "tests/runner/test_long_context.py",
    "tests/heads/test_native.py",
    "tests/heads/test_race_topk.py",
    "tests/sampling/test_native_sampler.py",
)
TESTS = (*SHARED, "tests/kernels", "tests/runner", "tests/sampling/test_extreme_values.py")


@dataclass(frozen=True)
class Fault:
    """A function of `fault_injection.cpp`, what it is called with, and what the report says."""

    function: str
    argument: int
    report: str


@dataclass(frozen=True)
class Sanitizer:
    """A build and how it is run."""

    name: str
    flags: str
    runtime: str  # loaded before Python, which is not instrumented
    options: dict[str, str]
    faults: tuple[Fault, ...]
    tests: tuple[str, ...]


SANITIZERS = (
    Sanitizer(
        name="address",
        flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        runtime="libasan.so",
        options={
            "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep memory until the process ends
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # so that arrays of Python have red zones, too
        },
        faults=(
            Fault("foretell_overflow", 10, "heap-buffer-overflow"),
            Fault("foretell_undefined", 1, "signed integer overflow"),
        ),
        tests=TESTS,
    ),
    Sanitizer(
        name="thread",
        flags="-fsanitize=thread",
        runtime="libtsan.so",
        # Python, torch and OpenMP are not instrumented: their locks are unknown, and so are their accesses.
        options={"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:report_signal_unsafe=0"},
        faults=(Fault("foretell_race", 3, "data race"),),
        tests=(*SHARED, "-p", "tests.three_threads"),
    ),
)


def environment(sanitizer: Sanitizer, logs: Path | None = None) -> dict[str, str]:
    """Return the environment for one run; reports go to files at `logs`."""
    found = {
        **os.environ,
        **sanitizer.options,
        EXTRA_FLAGS_VARIABLE: f"{COMMON} {sanitizer.flags}",
        "OMP_NUM_THREADS": "1",
    }
    if logs is not None:
        for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
            found[name] = ":".join(filter(None, (found.get(name), f"log_path={logs / 'report'}")))
    return found


def preloaded(sanitizer: Sanitizer) -> list[str]:
    """Return the words that start a program with the sanitizer's runtime and, for its shadow memory, without ASLR."""
    asked = [find_compiler(), f"-print-file-name={sanitizer.runtime}"]
    path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        raise BuildError(f"{sanitizer.runtime} is not here (it comes with g++)")
    fixed = [setarch, "--addr-no-randomize"] if (setarch := shutil.which("setarch")) else []
    return [*fixed, "env", f"LD_PRELOAD={path}"]


def check(sanitizer: Sanitizer) -> bool:
    """Build, plant the faults, run the tests; return whether all is well."""
    built = subprocess.run(
        [sys.executable, "-c", BUILD], env=environment(sanitizer), capture_output=True, text=True, check=True
    )
    library, start = built.stdout.strip(), preloaded(sanitizer)
    for fault in sanitizer.faults:
        call = [*start, sys.executable, "-c", CALL, library, fault.function, str(fault.argument)]
        found = subprocess.run(call, env=environment(sanitizer), capture_output=True, text=True)
        if fault.report not in found.stderr:
            print(f"{sanitizer.name}: the planted fault {fault.function} was not reported\n{found.stderr[-2000:]}")
            return False
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        call = [*start, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *sanitizer.tests, *LEFT_OUT]
        done = subprocess.run(call, env=environment(sanitizer, Path(folder)), capture_output=True, text=True)
        reports = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
    result = (done.stdout.strip().splitlines() or ["no output"])[-1]
    seconds = time.monotonic() - began
    print(f"{sanitizer.name}: {len(sanitizer.faults)} planted faults reported; tests: {result}; ", end="")
    print(f"{len(reports)} reports; {seconds:.0f} s", flush=True)
    for report in reports:
        print(report[:6000])
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-3000:], sep="\n")
    return not reports and not done.returncode


def main() -> int:
    wanted = sys.argv[1:] or [each.name for each in SANITIZERS]
    try:
        results = [check(each) for each in SANITIZERS if each.name in wanted]
    except (BuildError, subprocess.CalledProcessError) as error:
        print(f"sanitize: {error}")
        return 1
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
