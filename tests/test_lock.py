"""The lock files agree with pyproject.toml: all is in them, within its range, with a hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1]
LINE = re.compile(r"([a-z0-9-]+)==([^ \\]+) \\\n    --hash=sha256:[0-9a-f]{64}\n")
ON_CI = {"platform_system": "Linux", "python_version": "3.11", "sys_platform": "linux", "extra": ""}


def text_of(name: str) -> str:
    return (PROJECT / "requirements" / f"{name}.txt").read_text()


def locked(name: str) -> dict[str, str]:
    """Return the versions in a lock file; every line but the first must be a package with a hash."""
    header, _, lines = text_of(name).partition("\n")
    assert header.startswith("#") and not LINE.sub("", lines), "each package needs a version and a hash"
    return dict(LINE.findall(lines))


def wanted(extras: set[str]) -> list[Requirement]:
    """Return the direct requirements of the project with these extras, those of its own extras included."""
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    found = [Requirement(each) for each in config["project"]["dependencies"] + config["build-system"]["requires"]]
    for extra in extras:
        for each in map(Requirement, config["project"]["optional-dependencies"][extra]):
            found += wanted(each.extras) if each.name == config["project"]["name"] else [each]
    return [each for each in found if each.marker is None or each.marker.evaluate(ON_CI)]


@pytest.mark.parametrize(("name", "extras"), [("runtime", set()), ("dev", {"dev"})])
def test_every_requirement_is_locked_within_its_range(name: str, extras: set[str]) -> None:
    versions = locked(name)
    for each in wanted(extras):
        if each.name != "torch":
            assert each.specifier.contains(versions[canonicalize_name(each.name)]), each


def test_torch_is_pinned_without_a_hash_and_apart_from_the_others() -> None:
    (torch,) = [Requirement(line) for line in text_of("torch").splitlines()]
    (version,) = [spec.version for spec in torch.specifier]
    (range_,) = [each.specifier for each in wanted(set()) if each.name == "torch"]
    assert torch.name == "torch" and range_.contains(version)
    assert "torch" not in locked("runtime") and "torch" not in locked("dev")


def test_tests_run_with_the_versions_that_users_get() -> None:
    assert locked("runtime").items() <= locked("dev").items()
    assert "ray" in locked("dev") and "ray" not in locked("runtime"), "CI runs the tests of replicas"


@pytest.mark.parametrize("name", ["runtime", "dev", "torch"])
def test_no_index_and_no_cuda_is_named(name: str) -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links|@", text_of(name))
    assert not re.search(r"^(nvidia|cuda)-", text_of(name), re.MULTILINE)
