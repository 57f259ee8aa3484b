"""Known draft models and heads by target (pairs.json), and which of them are on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from foretell.hub.catalog import LocalModel

SUFFIXES = re.compile(r"-(instruct|it|chat|base|hf|pt|text|v\d(\.\d)?|\d{4})$")
# Drafters for any target, with nothing to download or train.
FOR_ANY = {
    "ngram": "copies what followed the last occurrence of the most recent tokens",
    "suffix": "suffix matching in the sequence and in finished ones, with a draft length by match quality",
    "corpus": "copies from files of your own, such as a repository: --draft-corpus FOLDER",
    "recycle": "token recycling: the target's top-k tokens after each token",
    "lookahead": "lookahead decoding: collects n-grams from parallel Jacobi iterations",
    "prediction": "copies the predicted output given with a request",
    "self:int8": "the target itself with int8 weights; int4 is smaller and has a lower acceptance rate",
    "exit:N": "early exit: the target's first N layers",
}


@dataclass(frozen=True)
class Suggestion:
    """A drafter for one target; `billions` of parameters, if known."""

    kind: str
    id: str
    billions: float | None
    note: str = ""

    @property
    def drafter(self) -> str:
        """Return the value of `--drafter`."""
        return f"{self.kind}:{self.id}" if self.id else self.kind


@dataclass(frozen=True)
class KnownTarget:
    """A target model with its known drafters."""

    family: str
    id: str
    billions: float
    drafts: tuple[Suggestion, ...]
    note: str = ""
    not_served: str = ""  # why this engine cannot serve the target; empty if it can

    @property
    def key(self) -> str:
        """Return the name without its owner, in lower case."""
        return short_name(self.id)


def known_targets() -> tuple[KnownTarget, ...]:
    """Return all targets of pairs.json."""
    content = json.loads((files("foretell.hub") / "pairs.json").read_text(encoding="utf-8"))
    return tuple(
        KnownTarget(**entry | {"drafts": tuple(Suggestion(**draft) for draft in entry["drafts"])})
        for entry in content["targets"]
    )


def find_target(name: str) -> KnownTarget | None:
    """Return the target of an id, a folder or a GGUF file: the longest known name that a part of it starts with.

    A name without an owner may also lack suffixes such as -instruct, as the names of `foretell plan` do.
    """
    parts = [short_name(part) for part in re.split(r"[/\\:]", name) if part]
    targets = known_targets()
    fitting = [target for target in targets if any(is_variant(part, target.key) for part in parts)]
    if not fitting and len(parts) == 1:
        return next((target for target in targets if base_name(target.key) == base_name(parts[0])), None)
    return max(fitting, key=lambda target: len(target.key), default=None)


def base_name(name: str) -> str:
    """Return a model's name without suffixes such as -instruct or -v0.2."""
    while (shorter := SUFFIXES.sub("", name)) != name:
        name = shorter
    return name


def short_name(name: str) -> str:
    """Return a model's name without owner and vendor prefix."""
    return name.rpartition("/")[2].lower().removeprefix("meta-")


def is_variant(name: str, key: str) -> bool:
    """Return whether a name is a target or a conversion of it, such as with the suffix -GGUF or -Q4_K_M."""
    return name == key or (name.startswith(key) and not name[len(key)].isalnum())


def is_installed(draft: Suggestion, models: Iterable[LocalModel]) -> bool:
    """Return whether a draft with its weights is on this machine; one that is part of its target always is."""
    return not draft.id or any(model.name == draft.id and has_weights(model) for model in models)


def has_weights(model: LocalModel) -> bool:
    """Return whether a model has weights: a cached repository may have its config only."""
    return model.present and (model.builtin or any(model.path.glob("*.safetensors")))
