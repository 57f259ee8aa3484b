"""Tokenizers from the files of a Hugging Face model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from foretell.errors import ModelError, UnsupportedModelError
from foretell.tokenizer.parts import Parts, added_ends

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRAS = ("additional_special_tokens", "extra_special_tokens")
FOLDER = "additional_chat_templates/"


def read_files(files: Mapping[str, str]) -> Parts:
    """What the files say, put together as transformers does it."""
    backend = read_backend(files)
    config = read_config(files)
    add_tokens(backend, config)
    named = {name: text_of(config[name]) for name in config if name.endswith("_token") and text_of(config[name])}
    set_ends(backend, config, named)
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    ends = frozenset() if eos is None else frozenset([eos])
    return Parts(backend, size, named, ends, read_templates(files, config))


def read_backend(files: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer of tokenizer.json, which neither cuts nor pads."""
    if "tokenizer.json" not in files:
        message = "the model has no tokenizer.json; load its tokenizer with transformers and save it, which writes one"
        raise UnsupportedModelError(message)
    try:
        backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    except Exception as problem:  # the library raises nothing narrower
        raise ModelError(f"tokenizer.json cannot be read: {problem}; fetch the file again") from problem
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_json(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """The object in a file; a file that is not there is empty."""
    try:
        value = json.loads(files.get(name, "{}"))
    except ValueError as problem:
        raise ModelError(f"{name} is not JSON: {problem}; fetch the file again") from problem
    if not isinstance(value, dict):
        raise ModelError(f"{name} must hold an object; fetch the file again")
    return value


def read_config(files: Mapping[str, str]) -> dict[str, Any]:
    """tokenizer_config.json; the older special_tokens_map.json counts where the former does not list the tokens."""
    config = read_json(files, "tokenizer_config.json")
    older = read_json(files, "special_tokens_map.json")
    return {**older, **config} if "added_tokens_decoder" in config else {**config, **older}


def text_of(entry: Any) -> str:
    """The text of a token, written as a string or as an object."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Give `backend` the added tokens that only the configuration knows, or knows better."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = sorted((int(number), entry) for number, entry in config.get("added_tokens_decoder", {}).items())
    new = [token for token in (added_token(entry) for _, entry in listed) if repr(token) not in known]
    backend.add_tokens(new)
    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    extras = [entry for name in EXTRAS for entry in listed_in(config.get(name))]
    for entry in [config.get(name) for name in NAMES] + extras:
        if text_of(entry) and text_of(entry) not in texts:
            backend.add_special_tokens([added_token(entry, special=True)])


def listed_in(value: Any) -> list[Any]:
    """The tokens of a list, or of an object that names them."""
    return list(value.values()) if isinstance(value, Mapping) else list(value or [])


def added_token(entry: Any, *, special: bool = False) -> AddedToken:
    """An added token with the settings written beside its text."""
    if isinstance(entry, str):
        return AddedToken(entry, special=special)
    settings = {name: bool(entry[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
    return AddedToken(text_of(entry), special=special or bool(entry.get("special")), **settings)


def set_ends(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """BOS and EOS as the configuration says; as tokenizer.json has it where that says nothing."""
    if "add_bos_token" in config or "add_eos_token" in config:
        bos = named.get("bos_token") if config.get("add_bos_token") else None
        added_ends(backend, bos, named.get("eos_token") if config.get("add_eos_token") else None)


def read_templates(files: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file of its own goes before the configuration."""
    templates: dict[str, str] = {}
    for value in (config.get("chat_template"), read_json(files, "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {entry["name"]: entry["template"] for entry in value}
    if "chat_template.jinja" in files:
        templates["default"] = files["chat_template.jinja"]
    return templates | {
        name.removeprefix(FOLDER).removesuffix(".jinja"): text
        for name, text in files.items()
        if name.startswith(FOLDER) and name.endswith(".jinja")
    }
