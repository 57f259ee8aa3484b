"""Tokenizers from the files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from foretell.errors import ModelError, UnsupportedModelError
from foretell.tokenizer.pipeline_limits import check_growth, check_pipeline
from foretell.tokenizer.spec import TokenizerSpec, library_error

MAX_VOCABULARY = 1 << 24  # tokens
MAX_REASON = 300  # characters
TEMPLATES_FOLDER = "additional_chat_templates/"


def read_files(files: Mapping[str, str]) -> TokenizerSpec:
    """Read the tokenizer files as transformers does."""
    backend = read_backend(files)
    try:
        return configured(backend, files, read_config(files))
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        message = f"tokenizer_config.json is not as transformers writes it ({problem!r}); download the file again"
        raise ModelError(message) from problem


def configured(backend: tokenizers.Tokenizer, files: Mapping[str, str], config: Mapping[str, Any]) -> TokenizerSpec:
    """Add the tokens and templates of tokenizer_config.json."""
    roles = with_roles(config)
    add_tokens(backend, config, list(roles.values()))
    named = {role: text_of(entry) for role, entry in roles.items()}
    eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > MAX_VOCABULARY:
        raise ModelError(f"tokenizer.json has token id {size - 1}; at most {MAX_VOCABULARY} tokens are supported")
    ends = frozenset() if eos is None else frozenset([eos])
    return TokenizerSpec(backend, size, named, ends, read_templates(files, config))


def read_backend(files: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Load tokenizer.json, without truncation or padding."""
    if "tokenizer.json" not in files:
        message = "the model has no tokenizer.json; load its tokenizer with transformers and save it, which writes one"
        raise UnsupportedModelError(message)
    try:
        check_growth(files["tokenizer.json"])
        backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
        backend.no_truncation()
        backend.no_padding()
        check_pipeline(backend)
    except ModelError:
        raise
    except BaseException as problem:  # the library raises nothing narrower, and panics are no Exception
        reason = " ".join(str(library_error(problem)).split())[:MAX_REASON]
        raise ModelError(f"tokenizer.json cannot be read: {reason}; download the file again") from problem
    return backend


def read_json(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """Read a JSON object; a missing file is empty."""
    try:
        value = json.loads(files.get(name, "{}"))
    except (ValueError, RecursionError) as problem:
        raise ModelError(f"{name} is not JSON: {problem}; download the file again") from problem
    if not isinstance(value, dict):
        raise ModelError(f"{name} must be an object; download the file again")
    return value


def read_config(files: Mapping[str, str]) -> dict[str, Any]:
    """Read tokenizer_config.json, or the older special_tokens_map.json if the former does not list added tokens."""
    config = read_json(files, "tokenizer_config.json")
    older = read_json(files, "special_tokens_map.json")
    return {**older, **config} if "added_tokens_decoder" in config else {**config, **older}


def text_of(entry: Any) -> str:
    """Return the text of a token given as a string or an object."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def with_roles(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens with a role, by role, including a model's own roles."""
    extra = config.get("extra_special_tokens")
    entries = {**config, **(extra if isinstance(extra, Mapping) else {})}
    return {role: entry for role, entry in entries.items() if role.endswith("_token") and text_of(entry)}


def add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: list[Any]) -> None:
    """Add the tokens that only the configuration has, or has with other settings."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = sorted((int(number), entry) for number, entry in (config.get("added_tokens_decoder") or {}).items())
    new = [token for token in (added_token(entry) for _, entry in listed) if repr(token) not in known]
    backend.add_tokens(new)
    known_texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    lists = [config.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    unnamed = [entry for value in lists if isinstance(value, list) for entry in value]
    missing = [added_token(entry, special=True) for entry in special + unnamed if text_of(entry) not in known_texts]
    backend.add_special_tokens(missing)


def added_token(entry: Any, *, special: bool = False) -> AddedToken:
    """Return an added token with its settings."""
    if isinstance(entry, str):
        return AddedToken(entry, special=special)
    settings = {name: bool(entry[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
    return AddedToken(text_of(entry), special=special or bool(entry.get("special")), **settings)


def read_templates(files: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; a separate file takes precedence over the configuration."""
    templates: dict[str, str] = {}
    for value in (config.get("chat_template"), read_json(files, "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {entry["name"]: entry["template"] for entry in value}
    if "chat_template.jinja" in files:
        templates["default"] = files["chat_template.jinja"]
    return templates | {
        name.removeprefix(TEMPLATES_FOLDER).removesuffix(".jinja"): text
        for name, text in files.items()
        if name.startswith(TEMPLATES_FOLDER) and name.endswith(".jinja")
    }
