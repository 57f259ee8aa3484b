"""From what a user calls a model to its sizes: a known name, a config.json or the folder it lies in, a GGUF file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.errors import ModelError, RequestError, UnknownModelError
from foretell.hub.catalog import BUILTINS
from foretell.hub.gguf_file import open_gguf
from foretell.hub.resolve import begins_as_gguf
from foretell.options import nearest

from .catalog import known
from .shapes import Experts, Latent, Shape, from_gguf, from_hf

FORMS = "a model is a known name, a config.json, the folder of one, or a .gguf file"
OUR_NAMES = {"gemma3-270m": "gemma-3-270m"}  # built-in models that the table has under their makers' names
ENDINGS = re.compile(r"-(instruct|it|chat|base|hf|pt|text|v\d(\.\d)?|\d{4})$")
CONFIG = "config.json"


def find_shape(spec: str, field: str) -> Shape:
    """The sizes of what a user named in `field`."""
    if not spec.strip():
        raise RequestError(field, f"is empty; {FORMS}")
    models = known()["models"]
    if spec.lower() in models or spec in BUILTINS:
        name = OUR_NAMES.get(spec, spec.lower())
        return _from_table(name, models[name])
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path):
        return _from_config(path / CONFIG)
    if os.path.isfile(path):
        return _from_gguf(path) if path.suffix == ".gguf" or begins_as_gguf(path) else _from_config(path)
    if path.suffix in (".json", ".gguf") or spec.startswith(("/", "./", "../", "~")):
        raise RequestError(field, f"there is no {spec}; {FORMS}")
    name = plain_name(spec)
    if name in models:
        return _from_table(name, models[name])
    raise UnknownModelError(f"{field}: {spec!r} is not known; {nearest(name, models)} {FORMS}")


def plain_name(spec: str) -> str:
    """A Hugging Face id as the table would have it: without owner, and without what does not change sizes."""
    name = spec.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    while True:
        shorter = ENDINGS.sub("", name)
        if shorter == name:
            return name
        name = shorter


def _from_table(name: str, entry: Mapping[str, Any]) -> Shape:
    sizes = dict(entry)
    if "experts" in sizes:
        sizes["experts"] = Experts(**sizes["experts"])
    if "latent" in sizes:
        sizes["latent"] = Latent(**sizes["latent"])
    return Shape(name, **sizes)


def _from_config(path: Path) -> Shape:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent}: has no {CONFIG}; {FORMS}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error.msg} in line {error.lineno}; {FORMS}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} is no model's config: it must be a JSON object with hidden_size and its like")
    return from_hf(str(path), values)


def _from_gguf(path: Path) -> Shape:
    file = open_gguf(path)
    shapes = {place.name: place.shape for place in file.tensor_infos}
    return from_gguf(path.name, file.metadata, shapes, sum(place.size for place in file.tensor_infos))
