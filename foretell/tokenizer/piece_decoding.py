"""Decoding of single pieces: as bytes, as text, or by the library's decoder only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

PieceText = bytes | str | None  # raw bytes, text with its neighbours only; complete text; no text
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_letters() -> dict[str, int]:
    """Return GPT-2's character of each byte: printable Latin-1 as itself, other bytes as U+0100 onwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteLevelDecoding:
    """Byte-level BPE: each character of a piece is a byte; all bytes together are UTF-8."""

    def __init__(self) -> None:
        self.letters = byte_letters()

    def read(self, piece: str) -> PieceText:
        """Return the bytes of a piece. A piece with any other character is plain text, as in the library."""
        try:
            return bytes([self.letters[letter] for letter in piece])
        except KeyError:
            return piece.encode()


@dataclass(frozen=True)
class SentencePieceDecoding:
    """SentencePiece: pieces are text with a marker for spaces; <0xAB> is one byte; the start may be stripped."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    strip_letter: str
    strip_count: int

    def read(self, piece: str) -> PieceText:
        """Return the text of a piece, or its byte."""
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        match = BYTE_PIECE.fullmatch(piece) if self.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else piece


@dataclass(frozen=True)
class OpaqueDecoding:
    """A decoder of another kind, which only the library can run."""

    decoder: tokenizers.decoders.Decoder | None

    def read(self, piece: str) -> PieceText:
        """Decode a single piece with the library."""
        return self.decoder.decode([piece]) if self.decoder else piece


PieceDecoding = ByteLevelDecoding | SentencePieceDecoding | OpaqueDecoding


def piece_decoding(backend: tokenizers.Tokenizer) -> PieceDecoding:
    """Return the decoding of `backend`'s decoder."""
    if backend.decoder is None:
        return OpaqueDecoding(None)
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoding()
    return sentence_piece(steps) or OpaqueDecoding(backend.decoder)


def sentence_piece(steps: list[dict[str, Any]]) -> SentencePieceDecoding | None:
    """Return the steps as SentencePiece decoding if they are exactly its own, in its order."""
    kinds = [step["type"] for step in steps]
    if not re.fullmatch(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?", "".join(kind + " " for kind in kinds)):
        return None
    replaced = [step for step in steps if step["type"] == "Replace"]
    strip: dict[str, Any] = steps[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strip["stop"] or any("String" not in step["pattern"] for step in replaced):
        return None
    replacements = tuple((step["pattern"]["String"], step["content"]) for step in replaced)
    return SentencePieceDecoding(replacements, "ByteFallback" in kinds, strip["content"], strip["start"])
