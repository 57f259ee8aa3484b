"""Which drafts are known to suit which targets: pairs.json, and what of it is on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from foretell.hub.catalog import LocalModel

# What works for any target: nothing to fetch, nothing to train.
FOR_ANY = {
    "ngram": "copies what followed the last time the text ended like this",
    "suffix": "the same over all the text and over finished ones, as far as the match promises",
    "recycle": "remembers the target's likeliest tokens after each token",
    "lookahead": "guesses runs of tokens beside the text and keeps those that come true",
    "prediction": "copies the text that a request says it expects",
    "self:int8": "the target itself with weights in 8 bits; int4 is smaller and guesses worse",
    "exit:N": "the target's own first N layers",
}


@dataclass(frozen=True)
class Suggestion:
    """A draft for one target. `billions` of weights, where known."""

    kind: str
    id: str
    billions: float | None
    note: str = ""

    @property
    def drafter(self) -> str:
        """What `--drafter` takes."""
        return f"{self.kind}:{self.id}" if self.id else self.kind


@dataclass(frozen=True)
class KnownTarget:
    """A model with drafts that suit it."""

    family: str
    id: str
    billions: float
    drafts: tuple[Suggestion, ...]
    note: str = ""

    @property
    def key(self) -> str:
        """Its name without its owner, in lower case."""
        return bare(self.id)


def known_targets() -> tuple[KnownTarget, ...]:
    """All of pairs.json."""
    content = json.loads((files("foretell.hub") / "pairs.json").read_text(encoding="utf-8"))
    return tuple(
        KnownTarget(**entry | {"drafts": tuple(Suggestion(**draft) for draft in entry["drafts"])})
        for entry in content["targets"]
    )


def find_target(name: str) -> KnownTarget | None:
    """The target a name stands for: an id, a folder, a GGUF file; the longest that any part of it begins with."""
    parts = [bare(part) for part in re.split(r"[/\\:]", name) if part]
    fitting = [target for target in known_targets() if any(begins(part, target.key) for part in parts)]
    return max(fitting, key=lambda target: len(target.key), default=None)


def bare(name: str) -> str:
    """A model's name as people shorten it."""
    return name.rpartition("/")[2].lower().removeprefix("meta-")


def begins(name: str, key: str) -> bool:
    """Whether a name is that of a target or of a conversion of it, as with -GGUF or -Q4_K_M behind it."""
    return name == key or (name.startswith(key) and not name[len(key)].isalnum())


def is_here(draft: Suggestion, models: Iterable[LocalModel]) -> bool:
    """Whether a draft is on this machine, its weights too; one that is built into its target is wherever that is."""
    return not draft.id or any(model.name == draft.id and has_weights(model) for model in models)


def has_weights(model: LocalModel) -> bool:
    """A cached repository may hold no more than its config."""
    return model.present and (model.builtin or any(model.path.glob("*.safetensors")))
