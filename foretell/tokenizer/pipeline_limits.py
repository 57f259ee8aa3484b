"""Limits on the normalizers, pre-tokenizers, post-processors and decoders that a tokenizer.json may ask for.

Some of them panic, hang or multiply the text without end. What they are asked to do is checked before the first text.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

from foretell.errors import ModelError

MAX_STEPS = 64  # of one kind; known files have up to ten
MAX_GROWTH = 32.0  # times that normalizing may lengthen a text
MAX_CONTENT = 256  # characters that a step inserts once
MAX_COUNT = 1024  # characters stripped, tokens inserted, and the like
MAX_PATTERN = 10_000  # characters of a regular expression
MAX_REPEATS = 3  # unbounded quantifiers in a row: the time of a failed match grows with this power of the length
PROBES = ("", "a", "Hello, world! 123\n\n\té世👍 <s>", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", " " * 64)


GROWING = ('"Replace"', '"Precompiled"', '"Prepend"')


def check_growth(source: str) -> None:
    """Refuse a normalizer that explodes, before the library has read the file: it normalizes added tokens at once.

    Parsing all of a large file twice would take a noticeable part of a start, so it is only done where one of the
    growing normalizers can be in it; its name could be escaped, too.
    """
    if not any(map(followed(source), GROWING)) and not escapes_letters(source):
        return
    document = json.loads(source)
    found = document.get("normalizer") if isinstance(document, dict) else None
    check_steps("normalizer", list(flattened(found)) if isinstance(found, dict) else [])


def followed(source: str) -> Callable[[str], bool]:
    """Return a function that finds a string where it is a value rather than a key of the vocabulary."""

    def find(name: str) -> bool:
        at = source.find(name)
        while at >= 0 and source[at + len(name) : at + len(name) + 64].lstrip()[:1] not in (",", "}"):
            at = source.find(name, at + 1)
        return at >= 0

    return find


def escapes_letters(source: str) -> bool:
    """Return whether an ASCII letter is written as an escape, which no library does."""
    return any(f"\\u00{digit}" in source for digit in "4567")


def check_pipeline(backend: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer with a step that could panic, hang or explode; then encode and decode a few short texts."""
    steps = {name: list(steps_of(getattr(backend, name))) for name in ("normalizer", "pre_tokenizer", "decoder")}
    for name, found in steps.items():
        check_steps(name, found)
    check_added(backend.post_processor)
    for text in PROBES:
        backend.decode(backend.encode(text).ids)


def check_steps(name: str, steps: list[dict[str, Any]]) -> None:
    """Refuse a component by its steps."""
    if len(steps) > MAX_STEPS:
        raise refused(name, f"has {len(steps)} steps; at most {MAX_STEPS} are run")
    for step in steps:
        check_step(name, step)
    if (growth := math.prod(map(growth_of, steps))) > MAX_GROWTH:
        raise refused(name, f"can lengthen a text {growth:.0f} times; at most {MAX_GROWTH:.0f} is allowed")


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
    if longest_mapping(step.get("precompiled_charsmap") or "") > MAX_CONTENT:
        raise refused(name, f"replaces a character by more than {MAX_CONTENT} bytes")
    for key in ("start", "stop", "length"):
        count = step.get(key)
        if isinstance(count, int) and not (key == "length") <= count <= MAX_COUNT:
            raise refused(name, f"has a {kind} with {key} {count}; at most {MAX_COUNT} is read")


def growth_of(step: dict[str, Any]) -> float:
    """Return how many times longer a text can become by a step."""
    if step.get("type") != "Replace":
        return 1.0
    shortest = len(step["pattern"].get("String") or "x")
    return max(1.0, len(step["content"]) / shortest)


def longest_mapping(charsmap: str) -> int:
    """Return the bytes of the longest replacement in SentencePiece's character map."""
    blob = base64.b64decode(charsmap)
    begin = 4 + int.from_bytes(blob[:4], "little")
    return max(map(len, blob[begin:].split(b"\0")), default=0)


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
UNBOUNDED = re.compile(r"[*+][+?]?|\{\d+,\}[+?]?")


def check_regex(name: str, pattern: str) -> None:
    """Refuse a regular expression that is known to take exponential time, or a high power of the length.

    That is a repetition of a group that itself repeats without bound, or many such repetitions in a row.
    """
    if len(pattern) > MAX_PATTERN:
        raise refused(name, f"has a regular expression of more than {MAX_PATTERN} characters")
    levels = [0]  # unbounded repetitions so far, of each open group's present branch
    most = [0]  # the most in any branch of the group
    brackets, closed = 0, 0  # how deep in character classes; repetitions in what the next quantifier would repeat
    for token in TOKEN.findall(pattern):
        if brackets or token == "[":
            brackets += (token == "[") - (token == "]")
            closed = 0
        elif token.startswith("("):
            if not token.endswith(")"):
                levels.append(0)
                most.append(0)
            closed = 0
        elif token == ")" and len(levels) > 1:
            closed = max(levels.pop(), most.pop())
            levels[-1] += closed
        elif token == "|":
            most[-1] = max(most[-1], levels[-1])
            levels[-1], closed = 0, 0
        elif UNBOUNDED.fullmatch(token):
            if closed:
                raise refused(name, f"has a regular expression that takes exponential time: {pattern[:80]!r}")
            levels[-1] += 1
        elif not token.startswith(("?", "{")):
            closed = 0
        if levels[-1] > MAX_REPEATS:
            raise refused(name, f"has a regular expression with more than {MAX_REPEATS} repetitions in a row")


def refused(name: str, reason: str) -> ModelError:
    """Return the error for a tokenizer.json that is not run."""
    return ModelError(f"tokenizer.json is not used: its {name} {reason}")
