"""A wheel in an empty environment without a compiler runs and uses the library that it carries."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from foretell.kernels.native.build import build_library
from foretell.kernels.native.library import library
from foretell.utils.system import home

ROOT = Path(__file__).parents[2]
TOP_LEVEL = (".git", ".venv", "build", "dist", "site")  # of the repository, not part of it
LIMIT = 1800  # seconds; a slow index takes minutes
TEXT = (
    "generate",
    "Name three primary colours.",
    "--max-tokens",
    "24",
    "--temperature",
    "0.8",
    "--seed",
    "7",
    "--json",
)
WITH_LIBRARY = (Path("kernels/test_quant.py"), Path("runner/test_native.py"), Path("sampling/test_native_sampler.py"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64") or library() is None,
        reason="wheels carry a library for x86-64 Linux, compiled here",
    ),
]


def run(*words: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a program, which must succeed without a warning about kernels, and return its output."""
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
    assert "no native kernels" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, since a build writes into it."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        wrong = {name for name in names if name == "__pycache__" or name.endswith(("_cache", ".egg-info"))}
        return wrong | (set(TOP_LEVEL) if Path(folder) == ROOT else set())

    return shutil.copytree(ROOT, tmp_path_factory.mktemp("packaging") / "tree", ignore=left_out)


@pytest.fixture(scope="module")
def packages(tree: Path) -> Path:
    """The folder with the source package and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--outdir", tree.parent / "dist", tree)
    return tree.parent / "dist"


@pytest.fixture(scope="module")
def wheel(packages: Path) -> Path:
    (found,) = packages.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(tree: Path) -> dict[str, str]:
    """An environment without compilers, and a cache folder that has models and nothing else."""
    (tree.parent / "bin").mkdir()
    models = home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (tree.parent / "home").mkdir()
    (tree.parent / "home" / "models").symlink_to(models)
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    return kept | {"PATH": str(tree.parent / "bin"), "FORETELL_HOME": str(tree.parent / "home")}


@pytest.fixture(scope="module")
def installed(wheel: Path, bare: dict[str, str]) -> Path:
    """The folder with the programs of an environment that has the wheel and what it needs."""
    python = wheel.parents[1] / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", wheel.parents[1] / "venv")
    # torch first: asked for by another package, pip may take a build with gigabytes of CUDA.
    run(python, "-m", "pip", "install", "--quiet", "--requirement", ROOT / "requirements" / "torch.txt", env=bare)
    run(python, "-m", "pip", "install", "--quiet", wheel, env=bare)
    return python.parent


def test_packages_are_described_and_carry_the_library_for_every_python(packages: Path, wheel: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *packages.iterdir())
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl") and len(list(packages.glob("*.tar.gz"))) == 1
    names = [name for name in zipfile.ZipFile(wheel).namelist() if "/prebuilt/" in name]
    (shared,) = [name for name in names if name.endswith(".so")]
    assert len(names) == 2 and f"{shared}.sha256" in names
    compiled = build_library().read_bytes()
    assert zipfile.ZipFile(wheel).read(shared) == compiled, "what the same compiler makes of a source tree"


def test_a_wheel_that_is_built_without_a_compiler_is_pure_python(tree: Path, bare: dict[str, str]) -> None:
    words = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tree.parent / "pure", tree)
    done = subprocess.run(words, env=bare, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and "this wheel has no native library: no C++ compiler" in done.stderr
    (wheel,) = (tree.parent / "pure").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "/prebuilt/" in name]


def test_auditwheel_finds_a_manylinux_tag_for_the_wheel(wheel: Path, tree: Path) -> None:
    """The wheel keeps its tag here: the tag depends on the C library of the machine that builds it."""
    run(sys.executable, "-m", "venv", tree.parent / "audit")
    run(tree.parent / "audit/bin/python", "-m", "pip", "install", "--quiet", "auditwheel>=6.2,<7")
    shown = " ".join(run(tree.parent / "audit/bin/auditwheel", "show", wheel).split())
    assert 'is consistent with the following platform tag: "manylinux_2_' in shown


def test_without_a_compiler_the_library_of_the_wheel_is_loaded(installed: Path, bare: dict[str, str]) -> None:
    program = "from foretell.kernels.native.library import library; print(library().path)"
    path = Path(run(installed / "python", "-I", "-c", program, env=bare).strip())
    assert path.parent.name == "prebuilt" and path.is_relative_to(installed.parent)


@pytest.mark.weights
def test_the_demo_runs_from_the_wheel(installed: Path, bare: dict[str, str], tmp_path: Path) -> None:
    assert run(installed / "foretell", "demo", env=bare, cwd=tmp_path).strip()
    assert not Path(bare["FORETELL_HOME"], "native").exists(), "nothing was compiled"


@pytest.mark.weights
def test_the_library_of_the_wheel_and_a_compiled_one_generate_the_same_tokens(
    installed: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    shipped = run(installed / "foretell", *TEXT, env=bare, cwd=tmp_path)
    compiled = run(sys.executable, "-m", "foretell", *TEXT, cwd=ROOT)
    assert json.loads(shipped)["token_ids"] == json.loads(compiled)["token_ids"]


def test_the_library_of_the_wheel_passes_the_tests_of_a_compiled_one(
    wheel: Path, tree: Path, bare: dict[str, str]
) -> None:
    """They compare it with the definitions, bit for bit where these are exact; without a library they are skipped."""
    zipfile.ZipFile(wheel).extractall(tree)
    files = [str("tests" / each) for each in WITH_LIBRARY]
    shown = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", *files, env=bare, cwd=tree)
    assert " passed" in shown and "skipped" not in shown, shown[-2000:]
