"""Names: each form finds its model, and what is wrong is said in one line that tells what would do."""

from __future__ import annotations

import errno
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from foretell.errors import (
    CapacityError,
    ForetellError,
    ModelError,
    RequestError,
    UnknownModelError,
    UnsupportedModelError,
)
from foretell.hub import DEFAULT_MODEL, local_models, open_checkpoint, pull, resolve
from foretell.hub.catalog import BUILTINS, model_file
from foretell.hub.fetch import marker, marker_content
from foretell.hub.huggingface import cached_gguf_names, explain
from tests.hub.files import small_gguf, some_tensors, write_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network and none of the user's caches."""
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def refusal(name: str, kind: type[ForetellError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cache_repo(folder: Path) -> Path:
    """A repository as Hugging Face's tools leave it in their cache."""
    repo = folder / "hub" / "models--own--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return write_folder(repo / "snapshots" / COMMIT, {"model.safetensors": some_tensors("a")})


def test_a_folder_and_a_gguf_file_stand_for_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "own" / "model", {"model.safetensors": some_tensors("a")})
    file = small_gguf(tmp_path / "m.gguf")
    blob = small_gguf(tmp_path / "sha256-1")
    for path in (folder, file, blob):
        assert resolve(str(path)) == pull(str(path)) == path
    assert resolve("own/model") == Path("own/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == file


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "has no *.safetensors" in refusal(str(tmp_path))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model.safetensors": some_tensors("a")})
    assert "name the folder" in refusal("model.safetensors")
    assert "not a model" in refusal("config.json")


def test_a_builtin_name_goes_before_a_path(tmp_path: Path) -> None:
    entry = BUILTINS[DEFAULT_MODEL]
    (tmp_path / DEFAULT_MODEL).mkdir()
    file = model_file(entry)
    file.parent.mkdir(parents=True)
    with file.open("wb") as content:
        content.truncate(entry.size)
    marker(file).write_text(marker_content(file.stat(), entry))
    assert resolve(DEFAULT_MODEL) == file


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_an_empty_name_is_a_bad_request(name: str) -> None:
    assert refusal(name, RequestError).startswith("model: is empty")


@pytest.mark.parametrize(
    "name", ["smollm", "/no/such", "./x", "../x/y", "a/b/c", "x.gguf", "dir/x.gguf", "a\0b", "x" * 9999, "a/../b.gguf"]
)
def test_an_unknown_name_lists_every_form(name: str) -> None:
    message = refusal(name, UnknownModelError)
    assert "owner/repo" in message and ".gguf file" in message


def test_the_nearest_builtin_is_offered() -> None:
    assert f"did you mean {DEFAULT_MODEL!r}?" in refusal("SmolLM2-135", UnknownModelError)


def test_a_cached_repository_needs_no_network(tmp_path: Path) -> None:
    folder = cache_repo(tmp_path)
    assert resolve("own/tiny") == folder
    assert list(open_checkpoint(folder).lazy_tensors) == ["a"]


def test_an_incomplete_cached_repository_is_refused_by_its_name(tmp_path: Path) -> None:
    (cache_repo(tmp_path) / "model.safetensors").unlink()
    assert refusal("own/tiny").startswith("own/tiny: has no *.safetensors")


def test_only_what_is_needed_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", {"model.safetensors": some_tensors("a")})
    names = [
        "config.json",
        "adapter_config.json",
        "model-1.safetensors",
        "pytorch_model.bin",
        "original/consolidated.safetensors",
    ]
    fetched: list[str] = []

    def snapshot(repo: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        allowed = [name for name in names if any(fnmatch(name, pattern) for pattern in allow_patterns)]
        fetched.extend(name for name in allowed if not any(fnmatch(name, pattern) for pattern in ignore_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("own/repo") == folder
    assert fetched == ["config.json", "adapter_config.json", "model-1.safetensors"]


@pytest.mark.parametrize("name", ["own/Repo-GGUF/sub/x-Q4_K_M.gguf", "own/Repo-GGUF:sub/x-Q4_K_M.gguf"])
def test_one_gguf_file_of_a_repository_can_be_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file, **_: f"/cache/{repo}|{file}")
    assert resolve(name) == Path("/cache/own/Repo-GGUF|sub/x-Q4_K_M.gguf")


def test_a_repository_of_gguf_files_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(tmp_path / "empty"))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, **_: ["b.gguf", "README.md", "a.gguf"])
    assert refusal("own/x") == "own/x: has GGUF files; name one, as own/x:Q4_K_M or own/x/FILE: a.gguf, b.gguf"


FILES = ["README.md", "mmproj-x-f16.gguf", "sub/x-Q4_K_M.gguf", "x-q8_0.gguf", "x.IQ2_XS.gguf"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("own/x:Q8_0", "x-q8_0.gguf"),
        ("own/x:iq2_xs", "x.IQ2_XS.gguf"),
        ("own/x:latest", "sub/x-Q4_K_M.gguf"),
        ("hf.co/own/x:Q4_K_M", "sub/x-Q4_K_M.gguf"),
    ],
)
def test_a_gguf_file_is_named_by_its_quantization(name: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, **_: FILES)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file, **_: f"/cache/{repo}|{file}")
    assert resolve(name) == Path(f"/cache/own/x|{file}")


def test_a_quantization_that_a_repository_lacks_lists_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, **_: FILES)
    assert "has no GGUF file in Q4; name one, as own/x/FILE: sub/x-Q4_K_M.gguf" in refusal("own/x:Q4")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, **_: ["model.safetensors"])
    assert refusal("own/x:latest") == "own/x: has no GGUF file; name it without :latest"


def test_a_cached_gguf_file_needs_no_network(tmp_path: Path) -> None:
    cached = cache_repo(tmp_path)
    (cached / "x-Q8_0.gguf").write_bytes(b"GGUF")
    assert cached_gguf_names("own/tiny") == ["x-Q8_0.gguf"]
    assert resolve("own/tiny:latest").name == "x-Q8_0.gguf"


OTHER = "89abcdef0123456789abcdef0123456789abcdef"


def test_a_revision_is_taken_from_the_cache(tmp_path: Path) -> None:
    folder = cache_repo(tmp_path)
    repo = folder.parents[1]
    other = write_folder(repo / "snapshots" / OTHER, {"model.safetensors": some_tensors("b")})
    (repo / "refs" / "v1").write_text(OTHER)
    for revision, found in ((None, folder), ("main", folder), ("v1", other), (OTHER, other), (COMMIT, folder)):
        assert resolve("own/tiny", revision=revision) == pull("own/tiny", revision=revision) == found
    with pytest.raises(ModelError, match="own/tiny at v2: .*HF_HUB_OFFLINE"):
        resolve("own/tiny", revision="v2")


def test_a_revision_reaches_hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", {"model.safetensors": some_tensors("a")})
    asked: list[str] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, revision, **_: (asked.append(revision), str(folder))[1]
    )
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda repo, file, revision: (asked.append(revision), str(folder))[1]
    )
    resolve("own/repo", revision="v1.0")
    resolve("own/repo/x.gguf", revision="refs/pr/3")
    assert asked == ["v1.0", "refs/pr/3"]


def test_only_a_repository_has_revisions(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "own" / "model", {"model.safetensors": some_tensors("a")})
    file = small_gguf(tmp_path / "m.gguf")
    for name, words in (
        (str(folder), "is a local path"),
        (str(file), "is a local path"),
        (DEFAULT_MODEL, "is a built-in model"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            resolve(name, revision="main")
        assert caught.value.field == "revision"


@pytest.mark.parametrize("revision", ["", " ", "../x", "a..b", "-x", "a b", "x" * 300, "a\nb"])
def test_a_malformed_revision_is_refused(revision: str) -> None:
    with pytest.raises(RequestError, match="must be a branch, a tag or a commit"):
        resolve("own/tiny", revision=revision)


class HTTPError(Exception):
    """Named as the HTTP client's own: which client it is changes with the library's version."""


class TransportError(HTTPError):
    """The HTTP client's for a request that got no answer."""


def answered(kind: Callable[..., Exception], status: int) -> Exception:
    return kind("two\nlines", response=SimpleNamespace(headers={}, request=None, status_code=status))


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (answered(errors.GatedRepoError, 403), "accept the terms", 1),
        (answered(errors.RepositoryNotFoundError, 404), "no such repository", 2),
        (answered(errors.RevisionNotFoundError, 404), "no such revision", 1),
        (answered(errors.RemoteEntryNotFoundError, 404), "no such file in the repository", 2),
        (errors.HFValidationError("invalid"), "one looks like owner/repo", 2),
        (answered(errors.HfHubHTTPError, 500), "unexpected answer", 1),
        (HTTPError("slow"), "unexpected answer", 1),
        (TransportError("no route"), "Hugging Face cannot be reached", 1),
        (errors.LocalEntryNotFoundError("gone"), "cannot be reached", 1),
        (errors.OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE", 1),
        (RuntimeError("two\nlines"), "two lines", 1),
    ],
)
def test_hugging_face_errors_have_a_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for name in ("own/repo", "own/repo/x.gguf"):
        assert words in refusal(name) and refusal(name).startswith(name)
        assert explain(name, error).exit_code == code


@pytest.mark.parametrize(
    "error",
    [
        answered(errors.RepositoryNotFoundError, 404),
        errors.LocalEntryNotFoundError("gone"),
        errors.OfflineModeIsEnabled("off"),
    ],
)
def test_an_unknown_name_that_could_be_a_path_is_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert refusal("models/nope").startswith("models/nope: no such local folder or file, ")


def test_a_repository_of_an_adapter_is_refused_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", {"adapter_model.safetensors": some_tensors("a")})
    (folder / "config.json").rename(folder / "adapter_config.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(folder))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, **_: ["adapter_config.json"])
    assert refusal("own/lora", UnsupportedModelError).startswith("own/lora: an adapter")


def test_a_full_disk_is_a_want_of_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "HF_HOME" in refusal("own/repo", CapacityError)


def test_offline_is_honoured_by_the_real_library() -> None:
    for name in ("own/none", "own/none/x.gguf"):
        assert "HF_HUB_OFFLINE forbids downloads" in refusal(name)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refusal("own/repo")


def test_local_models_are_the_builtins_and_the_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(model.name, model.builtin, model.present) for model in local_models()] == [
        (name, True, False) for name in BUILTINS
    ]
    folder = cache_repo(tmp_path)
    cached = local_models()[-1]
    assert (cached.name, cached.path, cached.builtin, cached.present) == ("own/tiny", folder, False, True)
    assert cached.size > 0
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert len(local_models()) == len(BUILTINS)


def test_importing_the_hub_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'gguf', 'safetensors', 'huggingface_hub'}"
    code = f"import sys, foretell.hub; sys.exit(str({heavy} & sys.modules.keys() or ''))"
    result = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert not result.stderr.strip(), result.stderr
