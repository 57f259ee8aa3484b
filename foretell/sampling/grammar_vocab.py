"""A tokenizer as llguidance wants to see it."""

from __future__ import annotations

from foretell.tokenizer import Tokenizer

SPECIAL = b"\xff"  # no text has this byte: llguidance knows special tokens by it
SENTINEL = "\x02"


class GrammarVocabulary:
    """The bytes of every token, and a way to spell text in tokens. llguidance asks for the attributes by name."""

    is_tokenizer_wrapper = True
    eos_token_id = None  # llguidance then adds an id of its own, len(tokens): its bit says that the text may stop
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.tokens = [_bytes_of(tokenizer, token) for token in range(vocab)]
        # Of tokens with the same bytes the last is the one texts are written with: byte fallbacks come early.
        self._ids = {spelt: token for token, spelt in enumerate(self.tokens) if spelt}
        for token, spelt in enumerate(self.tokens):
            if spelt and self._ids[spelt] != token:
                self.tokens[token] = b""
        self._longest = max(map(len, self._ids), default=0)
        self._tokenizer = tokenizer
        self._lead = self._encode(SENTINEL)

    def __call__(self, text: str) -> list[int]:
        """`text` in tokens as the model would have it, special tokens excepted: here their names are only text."""
        tokens = self._encode(text)
        if self._spells(tokens, text):
            return tokens
        # Some tokenizers put a space before a text; behind a sentinel it is not the text's own.
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
        """At each place the longest token that fits; a byte that no token has is left out."""
        tokens, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), start)
            tokens += [self._ids[text[start:end]]] if end > start else []
            start = max(end, start + 1)
        return tokens


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """No bytes for the ids a model has beyond its tokenizer's: no grammar allows those."""
    return (SPECIAL if token in tokenizer.special_ids else b"") + tokenizer.token_bytes(token)
