"""Grammars with a validator each, tiny vocabularies, and a random generator that needs no model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from foretell.sampling.grammar import GrammarCompiler
from foretell.sampling.grammar_matcher import GrammarMatcher
from foretell.structured_output import GrammarSpec
from foretell.tokenizer import Tokenizer
from foretell.types import Draft
from tests.tokenizer.examples import CONFIG, tiny

PADDING = 77  # ids that a model has beyond its tokenizer's
PAGE = [
    '{"name": "Ada", "age": 36, "tags": ["red", "blue"]}',
    '{"label": "root", "below": [{"label": "a", "below": []}, {"label": "b", "below": []}]}',
    'The answer is "yes, but"; see AB-123-alpha or XY-99999. 12+34*5, 7-8.',
    '{"type": "object", "required": ["name", "age"], "items": [true, false, null], "n": -1.5e3}',
]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"enum": ["a", "b", "<s>"]},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["label", "below"],
            "additionalProperties": False,
        }
    },
}
PATTERN = r"[A-Z]{2}-[0-9]{3,5}(-(alpha|beta))?"
CHOICES = ["yes", "no", "yes, but", "né 😀 <s>", 'a "quoted"\nline\\', "</s>"]
SUM = 'start: term (("+" | "-") term)*\nterm: NUMBER ("*" NUMBER)*\nNUMBER: /[0-9]{1,3}/'


def is_person(text: str) -> bool:
    value = json.loads(text)
    name, age, tags = value["name"], value["age"], value.get("tags", [])
    return (
        set(value) <= set(PERSON["properties"])
        and isinstance(name, str)
        and len(name) <= 12
        and isinstance(age, int)
        and 0 <= age <= 120
        and len(tags) <= 3
        and set(tags) <= {"red", "green", "blue"}
    )


def is_tree(text: str) -> bool:
    def is_valid(node: Any) -> bool:
        known = set(node) == {"label", "below"} and node["label"] in ("a", "b", "<s>")
        return known and len(node["below"]) <= 2 and all(map(is_valid, node["below"]))

    return is_valid(json.loads(text))


@dataclass(frozen=True)
class Example:
    """A spec, and whether a text is one of its."""

    spec: GrammarSpec
    is_valid: Callable[[str], bool]


EXAMPLES = {
    "person": Example(GrammarSpec.json_schema(PERSON), is_person),
    "one-line person": Example(
        GrammarSpec.json_schema(PERSON, any_whitespace=False),
        lambda text: is_person(text) and text == json.dumps(json.loads(text), ensure_ascii="\\u" in text),
    ),
    "tree": Example(GrammarSpec.json_schema(TREE), is_tree),
    "object": Example(GrammarSpec.json_object(), lambda text: isinstance(json.loads(text), dict)),
    "regex": Example(GrammarSpec.regex(PATTERN), lambda text: re.fullmatch(PATTERN, text) is not None),
    "anchored": Example(GrammarSpec.regex("^(ab|c)+$"), lambda text: re.fullmatch("(ab|c)+", text) is not None),
    "choice": Example(GrammarSpec.choice(CHOICES), lambda text: text in CHOICES),
    "lark": Example(
        GrammarSpec.lark(SUM), lambda text: re.fullmatch(r"\d{1,3}([-+*]\d{1,3})*", text, re.ASCII) is not None
    ),
    "special token": Example(
        GrammarSpec.lark('start: "a" (<s> "b")*'), lambda text: re.fullmatch("a(<s>b)*", text) is not None
    ),
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    """ "byte-level", trained on JSON, or "metaspace", which puts a space before a text and has bytes twice."""
    if kind == "metaspace":
        return tiny(kind)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(PAGE * 3, trainer)
    return Tokenizer.from_files({"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(CONFIG)})


@cache
def compiler(kind: str) -> GrammarCompiler:
    return GrammarCompiler(tokenizer(kind), tokenizer(kind).vocab_size + PADDING)


def matcher(kind: str, name: str) -> GrammarMatcher:
    """At the start of a text that the tokenizer's own end tokens end."""
    return compiler(kind).compile(EXAMPLES[name].spec).matcher(tokenizer(kind).end_ids)


def text_of(reader: Tokenizer, tokens: list[int]) -> str:
    """The whole text without its end token; bytes that are not UTF-8 are an error."""
    return b"".join(reader.token_bytes(token) for token in tokens if token not in reader.end_ids).decode()


def allowed(follower: GrammarMatcher) -> list[int]:
    tokens: list[int] = follower.masks()[0].nonzero()[:, 0].tolist()
    return tokens


@cache
def closing(reader: Tokenizer, vocab: int) -> Tensor:
    """The tokens that end a text or a part of it."""
    ends = [token in reader.end_ids or reader.token_bytes(token)[-1:] in (b'"', b"}", b"]") for token in range(vocab)]
    return torch.tensor(ends)


def pick(reader: Tokenizer, mask: Tensor, rng: random.Random) -> int:
    """Any allowed token; those that close something are favoured, so that outputs end."""
    closers = mask & closing(reader, len(mask))
    tokens = (closers if rng.random() < 0.4 and closers.any() else mask).nonzero()
    return int(tokens[rng.randrange(len(tokens))])


def write(reader: Tokenizer, follower: GrammarMatcher, rng: random.Random, longest: int = 600) -> list[int]:
    """A random text under the mask, to its end."""
    tokens: list[int] = []
    while not follower.finished and len(tokens) < longest:
        tokens.append(pick(reader, follower.masks()[0], rng))
        assert follower.advance(tokens[-1:]) == 1
    return tokens


def random_tree(reader: Tokenizer, make: Callable[[], GrammarMatcher], start: list[int], rng: random.Random) -> Draft:
    """Return a draft after `start` of mostly allowed tokens; siblings may repeat."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(rng.randrange(1, 9)):
        parents.append(rng.randrange(-1, node))
        options = list(range(reader.vocab_size))
        twin = follow(make, start, path_to(tokens, parents, parents[node]))
        if twin is not None and not twin.finished and rng.random() < 0.8:
            options = allowed(twin)
        tokens.append(rng.choice(options))
    return Draft(tuple(tokens), tuple(parents))


def path_to(tokens: list[int], parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


def follow(make: Callable[[], GrammarMatcher], start: list[int], path: list[int]) -> GrammarMatcher | None:
    """Return a fresh matcher after `start` and `path`, checking each token by its mask; None if one is not allowed."""
    twin = make()
    twin.advance(start)
    for token in path:
        if twin.finished or token not in allowed(twin):
            return None
        twin.advance([token])
    return twin
