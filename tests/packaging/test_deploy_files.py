"""Containers, workflows and hooks are linted, agree with each other, and name only what exists. None of them is run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretell.cli.main import build_parser

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
COMPOSE = ("compose.yaml", "compose.cuda.yaml")
WORKFLOWS = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / ".github/workflows").glob("*.yml")))
NOT_RUN = "not (built or )?run by the project's tests"


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def parsed(name: str) -> Any:
    return yaml.safe_load(text_of(name))


def lint(*words: str) -> None:
    """Run a linter of the environment; any finding fails."""
    done = subprocess.run([BIN / words[0], *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def instructions(name: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments; continued lines are joined."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text_of(name), flags=re.M)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def accepts(words: list[str]) -> bool:
    """Return whether the command line knows all of these words."""
    _, unknown = build_parser()[0].parse_known_args(words)
    return not unknown


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing(name: str) -> None:
    lint("hadolint", "--no-color", "--failure-threshold", "style", name)


def test_a_wrong_dockerfile_is_found(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /src && sudo make\n")
    with pytest.raises(AssertionError, match="DL3004"):
        lint("hadolint", "--no-color", str(tmp_path / "Dockerfile"))


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.compose-spec", COMPOSE),
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
    ],
)
def test_files_follow_their_schema(schema: str, files: tuple[str, ...]) -> None:
    lint("check-jsonschema", "--builtin-schema", schema, *files)


@pytest.mark.parametrize("name", [*DOCKERFILES, *COMPOSE, *WORKFLOWS])
def test_each_file_says_that_it_was_not_run(name: str) -> None:
    assert re.search(NOT_RUN, text_of(name))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_user_without_privileges_and_reports_its_health(name: str) -> None:
    final = instructions(name)[max(i for i, (word, _) in enumerate(instructions(name)) if word == "FROM") :]
    words = dict(final)
    assert int(words["USER"]) > 0 and f"--uid {words['USER']}" in text_of(name)
    assert "/health" in words["HEALTHCHECK"] and words["EXPOSE"] == "8000"
    assert (
        words["VOLUME"] == "/cache" and "FORETELL_HOME=/cache/foretell" in words["ENV"] and "HF_HOME=" in words["ENV"]
    )
    assert words["FROM"].startswith("python:3.11-"), "the version of the lock"
    assert json.loads(words["ENTRYPOINT"]) == ["foretell"] and accepts(json.loads(words["CMD"]))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_installs_from_files_that_docker_is_given(name: str) -> None:
    (install,) = [rest for word, rest in instructions(name) if word == "RUN" and "install.py" in rest]
    assert (ROOT / "requirements/install.py").exists() and "/foretell/requirements/install.py runtime --copy" in install
    kept = [line[1:] for line in text_of(".dockerignore").splitlines() if line.startswith("!")]
    assert all((ROOT / each).exists() for each in kept)
    needed = {"foretell", "pyproject.toml", "setup.py", "README.md", "LICENSE", "requirements"}
    assert needed == set(kept), "what the build of a wheel reads"


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_builds_and_starts_what_exists(name: str) -> None:
    service = parsed(name)["services"]["foretell"]
    build = {"context": service["build"]} if isinstance(service["build"], str) else service["build"]
    assert (ROOT / build["context"] / build.get("dockerfile", "Dockerfile")).exists()
    assert accepts([re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]])


def test_compose_passes_the_token_on_keeps_the_cache_and_opens_ports_to_this_machine_only() -> None:
    compose = parsed("compose.yaml")
    foretell = compose["services"]["foretell"]
    assert foretell["environment"] == ["HF_TOKEN"] and foretell["volumes"] == ["cache:/cache"]
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert len(ports) == 3 and all(port.startswith("127.0.0.1:") for port in ports)
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (ROOT / source).is_file(), mount


def test_prometheus_and_grafana_find_each_other_and_the_dashboard() -> None:
    compose = parsed("compose.yaml")["services"]
    (job,) = parsed("deploy/prometheus.yml")["scrape_configs"]
    assert (
        job["static_configs"] == [{"targets": ["foretell:8000"]}] and job.get("metrics_path", "/metrics") == "/metrics"
    )
    (source,) = parsed("deploy/grafana/datasources.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    interval = parsed("deploy/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = parsed("deploy/grafana/dashboards.yml")["providers"]
    goals = [mount.split(":")[:2] for mount in compose["grafana"]["volumes"]]
    (board,) = [from_ for from_, to in goals if fnmatch(to, provider["options"]["path"] + "/*.json")]
    assert json.loads((ROOT / board).read_text())["uid"] == "foretell"
    provisioned = {Path(to).parent.name for _, to in goals if "provisioning" in to}
    assert provisioned == {"datasources", "dashboards"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_run_what_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M))
    steps = [step for job in parsed(name)["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps
    for line in (line for step in steps for line in step["run"].splitlines()):
        first, *rest = shlex.split(line)
        if first == "make":
            assert set(rest) <= targets, line
        elif "/" in first:
            assert (ROOT / first).stat().st_mode & 0o111, line


def test_every_change_is_checked_and_tested() -> None:
    runs = [step.get("run") for job in parsed(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert {"make check", "make test"} <= set(runs)
    assert re.search(r'python-version: "3\.11"', text_of(".github/workflows/ci.yml")), "the version of the lock"


def test_hooks_run_the_tools_of_the_environment() -> None:
    (repository,) = parsed(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert set(hooks) == {"ruff-check", "ruff-format", "mypy"}
    for hook in hooks.values():
        program = shlex.split(hook["entry"])[0]
        assert hook["language"] == "system" and program.startswith(".venv/bin/") and (BIN / Path(program).name).exists()


def test_a_wheel_has_every_file_of_the_package() -> None:
    patterns = tomllib.loads(text_of("pyproject.toml"))["tool"]["setuptools"]["package-data"]["foretell"]
    packed = {path for pattern in patterns for path in (ROOT / "foretell").glob(pattern)}
    files = {path for path in (ROOT / "foretell").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert not {path for path in files - packed if path.suffix != ".py"}
    folders = {path.parent for path in files if path.suffix == ".py"}
    assert all((folder / "__init__.py").exists() for folder in folders), "setuptools looks for packages"


def test_the_source_package_names_what_exists() -> None:
    for line in (line for line in text_of("MANIFEST.in").splitlines() if not line.startswith("#")):
        word, *names = line.split()
        if word == "graft":
            assert all((ROOT / name).is_dir() for name in names), line
        elif word == "include":
            assert all(list(ROOT.glob(name)) for name in names), line
