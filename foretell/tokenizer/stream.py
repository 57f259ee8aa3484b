"""Incremental detokenization: returns each character as soon as later tokens cannot change it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from foretell.tokenizer.piece_decoding import ByteLevelDecoding, OpaqueDecoding, SentencePieceDecoding
from foretell.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class StreamDecoder:
    """Decodes tokens incrementally: all pushes and the flush concatenate to decode() of all tokens.

    `context` are tokens before the first pushed one. Their text is not returned, but a character they leave incomplete
    is completed, and a space that only the start of a text would lose is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, context: Sequence[int] = ()) -> None:
        skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = make_decoder(tokenizer, skipped)
        self._decoder.push(context)
        self._decoder.end_context()

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is now final."""
        return self._decoder.push(tokens)

    def flush(self) -> str:
        """Return the rest after the last token."""
        return self._decoder.flush()


class TextDecoder(Protocol):
    """Decoder that tokens are appended to."""

    def push(self, tokens: Sequence[int]) -> str: ...
    def end_context(self) -> None: ...
    def flush(self) -> str: ...


def make_decoder(tokenizer: Tokenizer, skipped: frozenset[int]) -> TextDecoder:
    """Return the incremental decoder for a tokenizer."""
    match tokenizer.piece_decoding:
        case ByteLevelDecoding():
            return Utf8Decoder(tokenizer, skipped)
        case SentencePieceDecoding() as decoding:
            return ByteRunDecoder(tokenizer, skipped, decoding)
        case OpaqueDecoding():
            return WindowDecoder(tokenizer, skipped)


class Utf8Decoder:
    """Decoder for byte-level tokenizers, whose text is the UTF-8 decoding of all bytes.

    A character has at most four bytes and its first byte tells its length, so at most the last three bytes are held
    back. Invalid bytes give the same U+FFFDs as decode(): one for each maximal incomplete prefix of a character.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self.piece_texts = tokenizer.piece_texts
        self.skipped = skipped
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        """Add the bytes of tokens."""
        read = [self.piece_texts[token] for token in tokens if token not in self.skipped]
        return self.decoder.decode(b"".join([piece for piece in read if isinstance(piece, bytes)]))

    def end_context(self) -> None:
        """Keep held bytes: they may be the start of a character that the next tokens complete."""

    def flush(self) -> str:
        """Return held bytes as U+FFFD."""
        return self.decoder.decode(b"", final=True)


class ByteRunDecoder:
    """Decoder for SentencePiece tokenizers, where only runs of <0xAB> byte pieces need context.

    A run of byte pieces decodes as UTF-8 if all of it is valid, else to one U+FFFD per byte. Even valid text inside a
    run is therefore final only when a text piece ends the run, or when a byte makes it invalid; from then on each byte
    is a U+FFFD. Skipped tokens do not end a run. Each byte is held and released once, so a push costs linear time.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], decoding: SentencePieceDecoding) -> None:
        self.piece_texts = tokenizer.piece_texts
        self.skipped = skipped
        self.strip_letter = decoding.strip_letter
        self.strip_count = decoding.strip_count
        self.held = bytearray()
        self.broken = False
        self.validator = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, tokens: Sequence[int]) -> str:
        """Add the text and bytes of tokens."""
        certain: list[str] = []
        for token in tokens:
            piece = None if token in self.skipped else self.piece_texts[token]
            if isinstance(piece, bytes):
                certain.append(self.add_byte(piece))
            elif piece is not None:
                certain += (self.end_run(), piece)
        return self.strip("".join(certain))

    def add_byte(self, byte: bytes) -> str:
        """Extend the run; return all of it once it cannot be valid any more."""
        self.held += byte
        if not self.broken:
            try:
                self.validator.decode(byte)
            except UnicodeDecodeError:
                self.broken = True
        return self.release() if self.broken else ""

    def end_run(self) -> str:
        """End the run and return its text."""
        if not self.held and not self.broken:
            return ""
        text = self.release()
        self.broken = False
        self.validator.reset()
        return text

    def release(self) -> str:
        """Return the text of the held bytes and clear them."""
        held, self.held = self.held, bytearray()
        try:
            return REPLACEMENT * len(held) if self.broken else held.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(held)

    def strip(self, text: str) -> str:
        """Strip the characters that the decoder removes at the start of the text."""
        while text and self.strip_count:
            if text[0] != self.strip_letter:
                self.strip_count = 0
            else:
                text = text[1:]
                self.strip_count -= 1
        return text

    def end_context(self) -> None:
        """Drop complete characters of a run at the end of the context; keep an incomplete last one."""
        if not self.broken:
            unfinished = self.validator.getstate()[0]
            self.strip(self.held[: len(self.held) - len(unfinished)].decode())
            self.held = bytearray(unfinished)

    def flush(self) -> str:
        """Return the text of the current run."""
        return self.strip(self.end_run())


class WindowDecoder:
    """Decoder for other tokenizers: decodes a window of recent tokens with and without the new ones.

    Exact for decoders whose text only grows at its end and where a token's text depends on the one before at most
    (Metaspace, WordPiece, suffixes, none at all). A U+FFFD at the end is held back until it resolves or is too long to
    be the start of a character.
    """

    LOOKBACK = 4

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.skipped = skipped
        self.window: list[int] = []
        self.waiting: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return their text, unless it ends in an incomplete character."""
        self.waiting += [t for t in tokens if t not in self.skipped and self.tokenizer.piece(t) is not None]
        if len(self.waiting) < self.LOOKBACK and self.text(self.window + self.waiting).endswith(REPLACEMENT):
            return ""
        return self.flush()

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special=False)

    def end_context(self) -> None:
        """Discard the text of the context."""
        self.flush()

    def flush(self) -> str:
        """Return the text that the waiting tokens add."""
        tokens = self.window + self.waiting
        new = self.text(tokens)[len(self.text(self.window)) :]
        self.window, self.waiting = tokens[-self.LOOKBACK :], []
        return new
