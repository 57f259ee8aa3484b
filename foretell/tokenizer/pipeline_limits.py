"""Limits on the normalizers, pre-tokenizers, post-processors and decoders that a tokenizer.json may ask for.

Some of them panic, hang or grow the text without bound, so their settings are checked before the first text.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from foretell.errors import ModelError

MAX_STEPS = 64  # of one kind; known files have up to ten
MAX_GROWTH = 8.0  # times that normalizer and pre-tokenizer together may lengthen a text, in bytes
MAX_CONTENT = 256  # characters that a step inserts once
MAX_MAPPING = 64  # bytes that a character map puts in place of one character; NFKC has up to 33
MAX_PREPEND = 16  # characters put before each text between two special tokens
MAX_COUNT = 1024  # characters stripped, tokens inserted, and the like
MAX_PATTERN = 10_000  # characters of a regular expression
MAX_REPEATS = 3  # unbounded quantifiers in a row: the time of a failed match grows with this power of the length
PROBES = ("", "a", "Hello, world! 123\n\n\té世👍 <s>", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", " " * 64)

# In known files, each of these is there at most once. Between other steps, a second one could lengthen a text again.
ONCE = ("Precompiled", "Metaspace", "Prepend", "NFC", "NFD", "NFKC", "NFKD", "BertNormalizer")
NORMALIZER = re.compile(r'"normalizer"\s*:\s*(?=\{)')
# A regular expression that begins with a character, an escape or a class, which is there at least once, and that has
# neither branches nor `\K`: it matches no empty string.
NOT_EMPTY = re.compile(
    r"(?:[^\\\[\](){}*+?|^$]|\\[sSdDwWnrt]|\[\^?[^\[\]\\&]+\])(?:\+|\{[1-9]\d*,?\})?(?![*+?{])(?:[^|\\]|\\[^K])*", re.S
)


def check_growth(source: str) -> None:
    """Refuse a normalizer that grows text too much, before the library loads the file and normalizes added tokens.

    Parsing a large file twice would slow down the start noticeably, so only the normalizer is parsed, unless its key
    could be written with escapes.
    """
    found = list(normalizers_in(source))
    if escapes_letters(source):
        document = json.loads(source)
        found += [document.get("normalizer")] if isinstance(document, dict) else []
    for normalizer in found:
        steps = list(flattened(normalizer)) if isinstance(normalizer, dict) else []
        check_steps("normalizer", steps)
        check_product({"normalizer": steps})


def normalizers_in(source: str) -> Iterator[Any]:
    """Yield every object that is the value of a key `normalizer`."""
    decoder, at = json.JSONDecoder(), NORMALIZER.search(source)
    while at is not None:
        try:
            value, end = decoder.raw_decode(source, at.end())
        except RecursionError:
            raise refused("normalizer", "is nested too deeply") from None
        yield value
        at = NORMALIZER.search(source, end)


def escapes_letters(source: str) -> bool:
    """Return whether an ASCII letter is written as an escape, which no library does."""
    return any(f"\\u00{digit}" in source for digit in "4567")


def check_pipeline(backend: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer with a step that could panic, hang or grow text; then encode and decode a few probes."""
    steps = {name: list(steps_of(getattr(backend, name))) for name in ("normalizer", "pre_tokenizer", "decoder")}
    for name, found in steps.items():
        check_steps(name, found)
    check_product({name: steps[name] for name in ("normalizer", "pre_tokenizer")})
    check_product({"decoder": steps["decoder"]})
    check_added(backend.post_processor)
    for text in PROBES:
        backend.decode(backend.encode(text).ids)


def check_steps(name: str, steps: list[dict[str, Any]]) -> None:
    """Refuse a component by its steps."""
    if len(steps) > MAX_STEPS:
        raise refused(name, f"has {len(steps)} steps; at most {MAX_STEPS} are run")
    for step in steps:
        check_step(name, step)
    kinds = [step.get("type") for step in steps]
    for kind in ONCE:
        if kinds.count(kind) > 1:
            raise refused(name, f"has {kinds.count(kind)} steps of type {kind}; one is run")


def check_product(components: dict[str, list[dict[str, Any]]]) -> None:
    """Refuse components that together lengthen a text too much."""
    growth = math.prod(growth_of(step) for steps in components.values() for step in steps)
    if growth > MAX_GROWTH:
        names = " and ".join(name for name, steps in components.items() if any(growth_of(step) > 1 for step in steps))
        raise refused(names, f"can lengthen a text {growth:.1f} times; at most {MAX_GROWTH:.0f} is allowed")


def steps_of(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a component, one after the other."""
    return flattened({} if component is None else json.loads(component.__getstate__()))


def flattened(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of nested sequences in their order."""
    waiting = [state] if state else []
    while waiting:
        step = waiting.pop()
        inner = [part for key in ("normalizers", "pretokenizers", "decoders") for part in step.get(key) or ()]
        if inner:
            waiting += reversed(inner)
        else:
            yield step


def check_step(name: str, step: dict[str, Any]) -> None:
    """Refuse one step by its settings."""
    kind = step.get("type")
    pattern = step.get("pattern")
    if isinstance(pattern, dict):
        if not pattern.get("String", pattern.get("Regex")):
            raise refused(name, f"has a {kind} with an empty pattern")
        if "Regex" in pattern:
            check_regex(name, pattern["Regex"])
    for key in ("content", "prepend", "prefix", "suffix", "replacement"):
        if len(str(step.get(key) or "")) > MAX_CONTENT:
            raise refused(name, f"has a {kind} with a {key} of more than {MAX_CONTENT} characters")
    if len(str(step.get("prepend") or "")) > MAX_PREPEND:
        raise refused(name, f"prepends more than {MAX_PREPEND} characters")
    if longest_mapping(step.get("precompiled_charsmap") or "") > MAX_MAPPING:
        raise refused(name, f"replaces a character by more than {MAX_MAPPING} bytes")
    for key in ("start", "stop", "length"):
        count = step.get(key)
        if isinstance(count, int) and not (key == "length") <= count <= MAX_COUNT:
            raise refused(name, f"has a {kind} with {key} {count}; at most {MAX_COUNT} is read")


def growth_of(step: dict[str, Any]) -> float:
    """Return how many times longer a text can become by a step, in bytes of UTF-8.

    The steps in ONCE count as 1, apart from character maps: alone, they have a bound that is small.
    """
    match step.get("type"):
        case "ByteLevel":  # each byte becomes a character of up to two bytes; a space of two may come before it
            return 3.0 if step.get("add_prefix_space") else 2.0
        case "Precompiled":
            return max(1.0, longest_of_ascii(base64.b64decode(step.get("precompiled_charsmap") or "")))
        case "Replace":
            content, pattern = len(step["content"].encode()), step["pattern"]
            if "String" in pattern:
                return max(1.0, content / len(pattern["String"].encode()))
            inserts = content and not NOT_EMPTY.fullmatch(pattern["Regex"])  # between any two characters
            return max(1.0, content + 1.0 if inserts else content)
    return 1.0


def longest_mapping(charsmap: str) -> int:
    """Return the bytes of the longest replacement in SentencePiece's character map."""
    blob = base64.b64decode(charsmap)
    begin = 4 + int.from_bytes(blob[:4], "little")
    return max(map(len, blob[begin:].split(b"\0")), default=0)


def longest_of_ascii(blob: bytes) -> int:
    """Return the bytes of the longest replacement of an ASCII character in SentencePiece's character map.

    The map has the size of a double-array trie, the trie, and the replacements. In a unit of the trie, bits 0 to 7 and
    31 are the label, bit 8 says that a replacement follows, and the bits from 10 on are the offset of the next unit.
    """
    end = 4 + int.from_bytes(blob[:4], "little")
    lengths = [0]
    for letter in range(128):
        at = offset_of(unit_at(blob, 0)) ^ letter
        unit = unit_at(blob, at)
        if unit & 0x800000FF == letter and unit >> 8 & 1:
            begin = end + (unit_at(blob, at ^ offset_of(unit)) & 0x7FFFFFFF)
            lengths.append(len(blob[begin : begin + MAX_MAPPING].partition(b"\0")[0]))
    return max(lengths)


def unit_at(blob: bytes, index: int) -> int:
    """Return a unit of the double-array trie; one outside the file is 0."""
    return int.from_bytes(blob[4 + 4 * index : 8 + 4 * index], "little")


def offset_of(unit: int) -> int:
    """Return how far the next unit is from this one, as an XOR of indices."""
    return unit >> 10 << ((unit & 0x200) >> 6)


def check_added(component: Any) -> None:
    """Refuse a post-processor that adds many tokens."""
    for step in [] if component is None else processors_of(json.loads(component.__getstate__())):
        known = step.get("special_tokens") or {}
        pieces = [piece for key in ("single", "pair") for piece in step.get(key) or ()]
        ids = [known.get(piece["SpecialToken"]["id"], {}).get("ids", ()) for piece in pieces if "SpecialToken" in piece]
        if len(pieces) + sum(map(len, ids)) > MAX_COUNT:
            raise refused("post_processor", f"adds more than {MAX_COUNT} tokens to each text")
        if sum("Sequence" in piece for piece in step.get("single") or ()) > 1:
            raise refused("post_processor", "repeats the text")


def processors_of(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the post-processors of a sequence."""
    parts = state.get("processors")
    if parts is None:
        yield state
    for part in parts or ():
        yield from processors_of(part)


# Escapes, groups, branches, quantifiers (also lazy and possessive ones), character classes, and single characters.
TOKEN = re.compile(
    r"\\[px]\{[^}]*\}|\\.|\(\?<?[:=!>]|\(\?[a-z-]+[:)]|[()|\[\]]|[*+?][+?]?|\{\d+(?:,\d*)?\}[+?]?|.", re.S
)
UNBOUNDED = re.compile(r"[*+]\??|\{\d+,\}[+?]?")
FIX = "rewrite it with a possessive quantifier or an atomic group"
POSSESSIVE = ("*+", "++")  # they give nothing back


def check_regex(name: str, pattern: str) -> None:
    """Refuse a regular expression that may take exponential time, or a high power of the length.

    That is a repetition of a group that itself repeats without bound, or many such repetitions in a row. Possessive
    quantifiers and atomic groups do not count: the search does not go back into them.
    """
    if len(pattern) > MAX_PATTERN:
        raise refused(name, f"has a regular expression of more than {MAX_PATTERN} characters")
    levels = [0]  # unbounded repetitions so far, of each open group's present branch
    most = [0]  # the most in any branch of the group
    opened = [""]  # how each open group begins
    brackets, closed = 0, 0  # how deep in character classes; repetitions in what the next quantifier would repeat
    for token in TOKEN.findall(pattern):
        if brackets or token == "[":
            brackets += (token == "[") - (token == "]")
            closed = 0
        elif token.startswith("("):
            if not token.endswith(")"):
                levels.append(0)
                most.append(0)
                opened.append(token)
            closed = 0
        elif token == ")" and len(levels) > 1:
            closed = max(levels.pop(), most.pop()) * (opened.pop() != "(?>")
            levels[-1] += closed
        elif token == "|":
            most[-1] = max(most[-1], levels[-1])
            levels[-1], closed = 0, 0
        elif token in POSSESSIVE:
            levels[-1] -= closed
            closed = 0
        elif UNBOUNDED.fullmatch(token):
            if closed:
                raise refused(name, f"has a regular expression that may take exponential time: {pattern[:80]!r}; {FIX}")
            levels[-1] += 1
        elif not token.startswith(("?", "{")):
            closed = 0
        if levels[-1] > MAX_REPEATS:
            words = f"has a regular expression with more than {MAX_REPEATS} repetitions in a row: {pattern[:80]!r}"
            raise refused(name, f"{words}; {FIX}")


def refused(name: str, reason: str) -> ModelError:
    """Return the error for a tokenizer.json that is not run."""
    return ModelError(f"tokenizer.json is not used: its {name} {reason}")
