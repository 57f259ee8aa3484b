"""The tokenizer interface that llguidance needs."""

from __future__ import annotations

from foretell.tokenizer import Tokenizer

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
