"""Structured output: grammars compiled once per model and its vocabulary, with a matcher for each sequence."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from foretell.errors import RequestError
from foretell.structured_output import FIELD, GrammarSpec
from foretell.tokenizer import Tokenizer

from .grammar_matcher import GrammarError, GrammarMatcher, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, which creates a matcher for each sequence. Thread-safe."""

    spec: GrammarSpec
    vocab: int
    prototype: LLMatcher

    def matcher(self, ends: Iterable[int]) -> GrammarMatcher:
        """Return a matcher at the start of a sequence with end tokens `ends`. Matchers share the lexer cache."""
        return GrammarMatcher(self.prototype.deep_copy(), self.vocab, ends)


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe; a long compilation does not block other threads."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, *, max_bytes: int = 64 * 1024, kept: int = 128) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._max_bytes = max_bytes
        self._kept = kept
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = Lock()
        self._grammars: dict[GrammarSpec, Grammar] = {}  # most recently used last
        self._grammars_lock = Lock()

    def prepare(self) -> LLTokenizer:
        """Build the vocabulary that the first grammar would otherwise wait for."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                vocabulary = GrammarVocabulary(self._tokenizer, self._vocab)
                self._vocabulary = _llguidance().LLTokenizer(vocabulary)
            return self._vocabulary

    def cached(self, spec: GrammarSpec) -> Grammar | None:
        """Return the grammar of `spec` if it is cached."""
        with self._grammars_lock:
            grammar = self._grammars.pop(spec, None)
            if grammar is not None:
                self._grammars[spec] = grammar
            return grammar

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Return the grammar of `spec`; raise RequestError with the reason if it is not supported."""
        known = self.cached(spec)
        if known is not None:
            return known
        if spec.size > self._max_bytes:
            raise RequestError(spec.field, f"has {spec.size} bytes; at most {self._max_bytes} are accepted")
        grammar = Grammar(spec, self._vocab, self._build(spec))
        with self._grammars_lock:
            self._grammars[spec] = grammar
            while len(self._grammars) > self._kept:
                del self._grammars[next(iter(self._grammars))]
        return grammar

    def _build(self, spec: GrammarSpec) -> LLMatcher:
        vocabulary = self.prepare()
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(verbose_errors=False)
        try:
            definition = _definition(spec)
        except RecursionError:
            raise RequestError(spec.field, "is nested too deeply; use fewer levels") from None
        matcher: LLMatcher = llguidance.LLMatcher(vocabulary, definition, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(spec.field, one_line(matcher.get_error()))
        self._try(spec, matcher)
        return matcher

    def _try(self, spec: GrammarSpec, matcher: LLMatcher) -> None:
        """Take one step and roll it back, which not every grammar supports. This also warms up the lexer."""
        trial = matcher.deep_copy()
        try:
            first = GrammarMatcher(trial, self._vocab, ()).masks()[0].nonzero()
        except GrammarError:
            raise RequestError(spec.field, one_line(trial.get_error()) or "allows no text but the empty one") from None
        if not (trial.consume_token(int(first[0])) and trial.rollback(1)):
            raise RequestError(spec.field, one_line(trial.get_error()))


def _definition(spec: GrammarSpec) -> str:
    """Return the spec in the format of llguidance."""
    match spec.kind:
        case "json_schema" | "json_object":
            return _grammar(json_schema=spec.bounded_schema())
        case "regex":
            return str(_llguidance().LLMatcher.grammar_from_regex(spec.text))
        case "choice":
            return _grammar(lark_grammar="start: " + " | ".join(map(json.dumps, spec.choices)))
        case "lark":
            return _grammar(lark_grammar=spec.text)


def _grammar(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]})


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(FIELD, "needs the package llguidance; pip install llguidance") from None
    return llguidance


SPECIAL = b"\xff"  # prefix of special tokens in llguidance; no UTF-8 text has this byte
SENTINEL = "\x02"


class GrammarVocabulary:
    """The bytes of every token, and a function that tokenizes text. llguidance reads the attributes by name."""

    is_tokenizer_wrapper = True
    eos_token_id = None  # llguidance then adds the id len(tokens), whose bit says that the text may end
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.tokens = [_bytes_of(tokenizer, token) for token in range(vocab)]
        # Of tokens with the same bytes the last is the one the model uses: byte fallbacks come first.
        self._ids = {spelt: token for token, spelt in enumerate(self.tokens) if spelt}
        for token, spelt in enumerate(self.tokens):
            if spelt and self._ids[spelt] != token:
                self.tokens[token] = b""
        self._longest = max(map(len, self._ids), default=0)
        self._tokenizer = tokenizer
        self._lead = self._encode(SENTINEL)

    def __call__(self, text: str) -> list[int]:
        """Return the model's tokenization of `text`; names of special tokens are plain text here."""
        tokens = self._encode(text)
        if self._spells(tokens, text):
            return tokens
        # Some tokenizers prepend a space; after a sentinel they do not.
        tokens = self._encode(SENTINEL + text)
        if tokens[: len(self._lead)] == self._lead and self._spells(tokens[len(self._lead) :], text):
            return tokens[len(self._lead) :]
        return self._longest_first(text.encode())

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)

    def _spells(self, tokens: list[int], text: str) -> bool:
        known = all(token < len(self.tokens) for token in tokens)
        return known and b"".join([self.tokens[token] for token in tokens]) == text.encode()

    def _longest_first(self, text: bytes) -> list[int]:
        """Tokenize greedily by the longest match; skip bytes that no token has."""
        tokens, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), start)
            tokens += [self._ids[text[start:end]]] if end > start else []
            start = max(end, start + 1)
        return tokens


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token; none for ids beyond the tokenizer's, which no grammar allows."""
    return (SPECIAL if token in tokenizer.special_ids else b"") + tokenizer.token_bytes(token)
