"""Tokenizers read from the files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foretell.errors import ModelError, RequestError, UnsupportedModelError
from foretell.tokenizer import Tokenizer
from foretell.tokenizer.tokenizer import BATCH_ENCODE_CHARS
from tests.tokenizer.examples import CONFIG, TEXTS, byte_level_json, metaspace_json, tiny, unicode_texts

JSON = {"byte-level": byte_level_json, "metaspace": metaspace_json}
KINDS = list(JSON)


def both(folder: Path, files: dict[str, Any]) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """The tokenizer of a folder as Foretell and as transformers reads it."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in files.items()}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return Tokenizer.from_files(texts), AutoTokenizer.from_pretrained(folder)


PLACES = ("{}", "a{}b", "x = '{}'  # not a token", " {}\n{}", "é {} «é»   {}")


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_control_tokens_can_be_plain_text(kind: str) -> None:
    tokenizer = tiny(kind)
    names = [tokenizer.token_text(token) for token in tokenizer.special_ids]
    assert len(names) >= 3
    for text in (place.format(name, name) for name in names for place in PLACES):
        tokens = tokenizer.encode_plain(text)
        assert tokenizer.special_ids.isdisjoint(tokens) and tokenizer.decode(tokens) == text, text
    for text in TEXTS:
        ordinary = tokenizer.encode(text, add_special=False)
        if tokenizer.special_ids.isdisjoint(ordinary):
            assert tokenizer.encode_plain(text) == ordinary
    with pytest.raises(RequestError, match="half a surrogate pair"):
        tokenizer.encode_plain("<s>\ud800")


def test_plain_text_is_encoded_as_by_the_library() -> None:
    """The library has a switch for it, which concerns all threads and special tokens alone."""
    backend = Backend.from_str(byte_level_json())
    backend.encode_special_tokens = True
    for text in (place.format("<|im_end|>", "<s>") for place in PLACES if "«é»" not in place):
        assert tiny("byte-level").encode_plain(text) == backend.encode(text, add_special_tokens=False).ids


def test_a_control_token_that_merges_can_make_is_spelled_out() -> None:
    parsed = json.loads(metaspace_json())
    vocab = parsed["model"]["vocab"]
    for made in ("<P", "<P>"):
        vocab[made] = len(vocab)
    vocab |= {letter: len(vocab) + i for i, letter in enumerate(letter for letter in "<P>" if letter not in vocab)}
    parsed["model"]["merges"] += [["<", "P"], ["<P", ">"]]
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    parsed["added_tokens"].append({"id": vocab["<P>"], "content": "<P>", **entry})
    tokenizer = Tokenizer.from_files(
        {"tokenizer.json": json.dumps(parsed), "tokenizer_config.json": json.dumps(CONFIG)}
    )
    assert vocab["<P>"] in tokenizer.encode("a<P>b")
    tokens = tokenizer.encode_plain("a<P>b")
    assert vocab["<P>"] not in tokens and tokenizer.decode(tokens) == "a<P>b"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, {"tokenizer.json": JSON[kind](), "tokenizer_config.json": CONFIG})
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ours.encode(text), skip_special=skip) == theirs.decode(
                theirs.encode(text), skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert (ours.vocab_size, ours.bos_id) == (len(theirs), theirs.bos_token_id)
    assert ours.end_ids == {theirs.eos_token_id}


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_encoded_without_the_gil(kind: str, tmp_path: Path) -> None:
    """`encode_batch_fast` releases it, `encode` does not; the ids are the same."""
    ours, theirs = both(tmp_path, {"tokenizer.json": JSON[kind](), "tokenizer_config.json": CONFIG})
    text = "".join(TEXTS) * (BATCH_ENCODE_CHARS // len("".join(TEXTS)) + 1)
    ours._backend = SimpleNamespace(encode_batch_fast=ours._backend.encode_batch_fast)  # type: ignore[assignment]
    assert len(text) > BATCH_ENCODE_CHARS and ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(text=unicode_texts)
def test_any_text_survives(kind: str, text: str) -> None:
    tokenizer = tiny(kind)
    special = {tokenizer.token_text(token) for token in tokenizer.special_ids}
    if not any(name in text for name in special):
        # SentencePiece writes spaces with the mark, so a mark in the text comes back as a space.
        expected = text.replace("▁", " ") if kind == "metaspace" else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_bos_is_added_as_tokenizer_json_says_whatever_the_configuration(tmp_path: Path) -> None:
    for kind, flag in (("byte-level", True), ("metaspace", False)):
        config = {**CONFIG, "add_bos_token": flag, "add_eos_token": flag}
        ours, theirs = both(tmp_path, {"tokenizer.json": JSON[kind](), "tokenizer_config.json": config})
        for text in ("", "a b", "<s>a"):
            assert ours.encode(text) == theirs.encode(text)


def test_tokens_only_the_configuration_has_are_added(tmp_path: Path) -> None:
    size = tiny("byte-level").vocab_size
    tool = {
        "content": "<tool>",
        "special": True,
        "lstrip": False,
        "rstrip": True,
        "single_word": False,
        "normalized": False,
    }
    listed = {str(size): tool, str(size + 1): {**tool, "content": "<note>", "special": False}}
    config = {**CONFIG, "added_tokens_decoder": listed, "pad_token": "<pad>", "additional_special_tokens": ["<x>"]}
    config["image_token"] = "<image>"
    ours, theirs = both(tmp_path, {"tokenizer.json": byte_level_json(), "tokenizer_config.json": config})
    for text in ("a<tool> b<note> c", "<pad><x><image>", "  wide  <think>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_special_tokens_of_the_older_file_count(tmp_path: Path) -> None:
    older = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|im_end|>"}
    files = {"tokenizer.json": byte_level_json(), "tokenizer_config.json": CONFIG, "special_tokens_map.json": older}
    ours, theirs = both(tmp_path, files)
    assert (ours.bos_id, ours.end_ids) == (theirs.bos_token_id, {theirs.eos_token_id})


def test_a_tokenizer_that_cuts_and_pads_does_neither_here() -> None:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(byte_level_json())
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_files({"tokenizer.json": backend.to_str()})
    assert tokenizer.decode(tokenizer.encode("one two three four")) == "one two three four"
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    tokenizer = tiny(kind)
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special=False)
        joined = b"".join(tokenizer.token_bytes(token) for token in tokens).decode()
        assert joined.removeprefix(" " if kind == "metaspace" else "") == tokenizer.decode(tokens, skip_special=False)


def test_tokens_show_as_text() -> None:
    tokenizer = tiny("byte-level")
    (think,) = tokenizer.encode("<think>")
    assert tokenizer.token_text(think) == "<think>"
    assert [tokenizer.token_text(token) for token in tokenizer.encode("\U0010ffff")] == ["\ufffd"] * 4
    assert tokenizer.token_bytes(tokenizer.bos_id or 0) == b"<s>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.decode([10**6]) == ""


def test_broken_files_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="no tokenizer.json"):
        Tokenizer.from_files({})
    with pytest.raises(ModelError, match="tokenizer.json cannot be read"):
        Tokenizer.from_files({"tokenizer.json": "{}"})
    with pytest.raises(ModelError, match="tokenizer_config.json is not JSON"):
        Tokenizer.from_files({"tokenizer.json": byte_level_json(), "tokenizer_config.json": "{"})
    with pytest.raises(ModelError, match="not as transformers writes it"):
        Tokenizer.from_files({"tokenizer.json": byte_level_json(), "tokenizer_config.json": '{"chat_template": [1]}'})
    with pytest.raises(ModelError, match="special_tokens_map.json must be an object"):
        Tokenizer.from_files({"tokenizer.json": byte_level_json(), "special_tokens_map.json": "[]"})


def test_half_a_surrogate_pair_is_the_callers_fault() -> None:
    with pytest.raises(RequestError, match="prompt: .*character 1"):
        tiny("byte-level").encode("a\ud800b")
