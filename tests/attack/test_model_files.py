"""Damaged and hostile model files: a model, or one error in one line; never a crash, a hang or all memory."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import ModelError, RequestError
from foretell.tokenizer import Tokenizer
from tests.tokenizer.examples import byte_level_json

REPO = Path(__file__).parents[2]
KINDS = ("gguf", "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "costs")


def fuzz(kinds: str, seed: int, count: int, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tiny"
    copy.symlink_to(folder)
    run("tests.attack.fuzz_files", kinds, str(seed), str(count), str(copy), tmp_path=tmp_path)


def run(module: str, *arguments: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO), "FORETELL_HOME": str(tmp_path / "home"), "FORETELL_NATIVE": "0"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines == ["done"], (lines, done.stderr[-2000:])


def test_damaged_files_are_rejected_or_read(tiny_folder: Path, tmp_path: Path) -> None:
    fuzz(",".join(KINDS), 1, 30, tiny_folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_files_are_rejected_or_read(kind: str, seed: int, tiny_folder: Path, tmp_path: Path) -> None:
    fuzz(kind, seed, 1000, tiny_folder, tmp_path)


def test_damaged_quantized_checkpoints_are_rejected_or_read(tmp_path: Path) -> None:
    run("tests.attack.fuzz_quantized", "1", "300", str(tmp_path / "models"), tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_damaged_quantized_checkpoints_are_rejected_or_read(seed: int, tmp_path: Path) -> None:
    run("tests.attack.fuzz_quantized", str(seed), "3000", str(tmp_path / "models"), tmp_path=tmp_path)


def with_parts(**parts: Any) -> Tokenizer:
    document = json.loads(byte_level_json()) | parts
    return Tokenizer.from_files({"tokenizer.json": json.dumps(document)})


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def stripping(start: int, stop: int) -> dict[str, Any]:
    return {"type": "Strip", "content": " ", "start": start, "stop": stop}


def splitting(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def in_sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*steps]}


def byte_level(count: int, **settings: Any) -> dict[str, Any]:
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False, **settings}
    return {"type": "Sequence", "pretokenizers": [step] * count}


def precompiled(letter: str, replacement: bytes) -> dict[str, Any]:
    """SentencePiece's character map with one entry: a double-array trie, then the replacements."""
    units, first = [0] * 2048, 256 ^ ord(letter)
    units[0], units[first] = 256 << 10, ord(letter) | 0x100 | 512 << 10
    trie = struct.pack(f"<{len(units)}I", *units)
    blob = struct.pack("<I", len(trie)) + trie + replacement + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
DOUBLING = replacing({"Regex": "."}, "ab")
HOSTILE: dict[str, dict[str, Any]] = {
    "empty pattern": {"normalizer": replacing({"String": ""}, "x")},
    "doubling nine times": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 9}},
    "nested sequences": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLING] * 5}] * 5}
    },
    "a long replacement": {"normalizer": replacing({"String": "a"}, "x" * 10_000)},
    "bytes as characters, again and again": {"normalizer": in_sequence(*[{"type": "ByteLevel"}] * 20)},
    "bytes as characters in words": {"pre_tokenizer": byte_level(20)},
    "a space before each of many words": {"pre_tokenizer": byte_level(3, add_prefix_space=True)},
    "growth in two components": {"normalizer": replacing({"String": "a"}, "x" * 5), "pre_tokenizer": byte_level(1)},
    "thirty-two times": {"normalizer": replacing({"String": "a"}, "x" * 32)},
    "a character map twice": {"normalizer": in_sequence(*[precompiled("a", b"aa")] * 2)},
    "a long mapping": {"normalizer": precompiled("\xe4", b"a" * 200)},
    "a mapping of a letter": {"normalizer": precompiled("a", b"a" * 20)},
    "a look-ahead": {"normalizer": in_sequence(*[replacing({"Regex": "(?=.)"}, "a")] * 26)},
    "no letter": {"normalizer": in_sequence(*[replacing({"Regex": "x*"}, "a")] * 26)},
    "a word boundary": {"normalizer": in_sequence(*[replacing({"Regex": r"\b"}, "a")] * 26)},
    "an empty group": {"normalizer": in_sequence(*[replacing({"Regex": "()"}, "a")] * 26)},
    "an optional repetition": {"normalizer": in_sequence(*[replacing({"Regex": "x+*"}, "a")] * 26)},
    "an optional count": {"normalizer": in_sequence(*[replacing({"Regex": "x{2}?"}, "a")] * 26)},
    "what is kept": {"normalizer": in_sequence(*[replacing({"Regex": r"a\K"}, "a")] * 26)},
    "accents that multiply": {
        "normalizer": in_sequence(
            *[*(replacing({"String": mark}, "\u0390") for mark in "\u03b9\u0308\u0301"), {"type": "NFD"}] * 16
        )
    },
    "spaces around each character": {"normalizer": in_sequence(*[{"type": "BertNormalizer", **BERT}] * 20)},
    "a prefix many times": {"normalizer": in_sequence(*[{"type": "Prepend", "prepend": "x"}] * 20)},
    "other spaces many times": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [METASPACE] * 20}},
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 10_000}},
    "many steps": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}},
    "strip at the start": {"decoder": stripping(2**63, 0)},
    "strip at the end": {"decoder": stripping(0, 2**63)},
    "decoder that doubles": {"decoder": {"type": "Sequence", "decoders": [replacing({"String": "a"}, "aa")] * 9}},
    "exponential time": {"pre_tokenizer": splitting("(a+)+$")},
    "exponential time in a group": {"pre_tokenizer": splitting("(?:x?(?:[a-z]+))*y")},
    "a high power of the length": {"pre_tokenizer": splitting("a*a*a*a*a*b")},
    "a long pattern": {"pre_tokenizer": splitting("a" * 20_000)},
    "words of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a text repeated": {
        "post_processor": {"type": "TemplateProcessing", "single": [TEXT] * 50, "pair": [], "special_tokens": {}}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizers_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        with_parts(**HOSTILE[name])
    assert "\n" not in str(caught.value) and "tokenizer.json" in str(caught.value)


SPACE = replacing({"String": " "}, "▁")
SPACES = replacing({"Regex": " {2,}"}, "▁")
DIGITS = {"type": "Digits", "individual_digits": True}
STRIP = {"type": "Strip", "strip_left": False, "strip_right": True}
KNOWN_PIPELINES: dict[str, dict[str, Any]] = {
    "GPT-2": {"normalizer": None, "pre_tokenizer": byte_level(1, use_regex=True)},
    "RoBERTa": {"normalizer": None, "pre_tokenizer": byte_level(1, use_regex=True, add_prefix_space=True)},
    "Llama 3": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitting(r"\p{L}+"), byte_level(1)]}},
    "Qwen": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitting(r"\p{L}+"), byte_level(1)]},
    },
    "SmolLM2": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, byte_level(1, use_regex=True)]}},
    "Gemma": {"normalizer": SPACE, "pre_tokenizer": splitting(" ")},
    "Llama 2": {"normalizer": in_sequence({"type": "Prepend", "prepend": "▁"}, SPACE), "pre_tokenizer": None},
    "Mistral": {"normalizer": None, "pre_tokenizer": METASPACE},
    "T5": {"normalizer": in_sequence(precompiled("\t", b" "), STRIP, SPACES), "pre_tokenizer": METASPACE},
    "XLM-R": {
        "normalizer": in_sequence(precompiled("\t", b" "), replacing({"Regex": " {2,}"}, " ")),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, METASPACE]},
    },
    "ALBERT": {
        "normalizer": in_sequence(
            replacing({"String": "``"}, '"'),
            replacing({"String": "''"}, '"'),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            precompiled("\t", b" "),
            replacing({"Regex": " {2,}"}, " "),
        ),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, METASPACE]},
    },
    "CLIP": {
        "normalizer": in_sequence({"type": "NFC"}, replacing({"Regex": r"\s+"}, " "), {"type": "Lowercase"}),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [splitting(r"'s|[\p{L}]+|[\p{N}]"), byte_level(1)]},
    },
    "BERT": {"normalizer": {"type": "BertNormalizer", **BERT}, "pre_tokenizer": {"type": "BertPreTokenizer"}},
}


@pytest.mark.parametrize("name", KNOWN_PIPELINES)
def test_pipelines_of_known_models_are_accepted(name: str) -> None:
    tokenizer = with_parts(**KNOWN_PIPELINES[name])
    assert tokenizer.encode("a world  of 12 wörds")


def test_a_normalizer_is_checked_before_the_library_reads_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library normalizes added tokens as it reads them."""
    document = json.dumps(json.loads(byte_level_json()) | HOSTILE["bytes as characters, again and again"])
    monkeypatch.setattr("tokenizers.Tokenizer.from_str", None)
    for source in (document, document.replace('"normalizer": ', '"normalizer" :\n'), document + " "):
        with pytest.raises(ModelError, match="can lengthen a text"):
            Tokenizer.from_files({"tokenizer.json": source})


def test_a_normalizer_nested_without_end_is_refused() -> None:
    with pytest.raises(ModelError, match="nested too deeply"):
        Tokenizer.from_files({"tokenizer.json": '{"normalizer": ' * 100_000})


def test_a_normalizer_with_an_escaped_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(byte_level_json()) | {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 30}}
    escaped = json.dumps(document).replace('"Replace"', '"\\u0052eplace"')
    with pytest.raises(ModelError, match="can lengthen a text"):
        Tokenizer.from_files({"tokenizer.json": escaped})


# One known tokenizer file each: GPT-4's, Qwen's, Llama 3's, BLOOM's and others' patterns.
KNOWN = (
    r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lo}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[\p{L}&&[^\p{Han}]]+|\p{N}{1,3}",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    # Possessive quantifiers and atomic groups give nothing back, so they take no exponential time.
    r"(?:a++)+b",
    r"(?>a+)+b",
    r"(?:a+)++b",
    r"a*+a*+a*+a*+a*+b",
)


@pytest.mark.parametrize("pattern", KNOWN)
def test_patterns_of_known_models_are_accepted(pattern: str) -> None:
    assert with_parts(pre_tokenizer=splitting(pattern)) is not None


def test_a_rejected_pattern_error_says_what_works() -> None:
    with pytest.raises(ModelError, match=r"may take exponential time: '\(a\+\)\+'; rewrite it with a possessive"):
        with_parts(pre_tokenizer=splitting("(a+)+"))
    with pytest.raises(ModelError, match="exponential"):
        with_parts(pre_tokenizer=splitting("(?>(?:a+)+b)"))


class PanicException(BaseException):
    """Named as the tokenizers library names its own, which cannot be imported."""


class Panicking:
    """A tokenizer backend that panics."""

    def encode(self, *_: Any, **__: Any) -> Any:
        raise PanicException("index out\nof range")

    decode = encode


def test_a_panic_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_parts()
    monkeypatch.setattr(tokenizer, "_backend", Panicking())
    with pytest.raises(RequestError, match="prompt: the model's tokenizer cannot encode this: index out of range"):
        tokenizer.encode("a")
    with pytest.raises(RequestError, match="cannot decode this: index out of range"):
        tokenizer.decode([1])


def test_a_pattern_that_gives_up_is_an_error_of_its_request() -> None:
    tokenizer = with_parts(pre_tokenizer=splitting("(a|aa)+b"))
    with pytest.raises(RequestError, match="cannot encode this: .*retry-limit"):
        tokenizer.encode("a" * 60)
    assert tokenizer.encode("aab")


def test_an_interrupt_is_no_panic(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    tokenizer = with_parts()
    monkeypatch.setattr(Panicking, "encode", interrupted)
    monkeypatch.setattr(tokenizer, "_backend", Panicking())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
