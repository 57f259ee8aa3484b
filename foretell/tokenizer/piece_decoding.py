"""How a tokenizer's decoder reads its pieces: as bytes, as text, or in a way only it knows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

Reading = bytes | str | None  # raw bytes that make text with their neighbours; finished text; nothing at all
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_letters() -> dict[str, int]:
    """The letter GPT-2 writes for each byte: printable Latin-1 as itself, the other bytes as U+0100 onwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteLevel:
    """Each letter of a piece is a byte; the bytes of all pieces together are UTF-8."""

    def __init__(self) -> None:
        self.letters = byte_letters()

    def read(self, piece: str) -> Reading:
        """The bytes a piece stands for. A piece with any other letter in it is plain text, as the decoder has it."""
        try:
            return bytes([self.letters[letter] for letter in piece])
        except KeyError:
            return piece.encode()


@dataclass(frozen=True)
class SentencePiece:
    """Pieces are text with a mark for the space; <0xAB> is one byte; the start of the whole text may be stripped."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    strip_letter: str
    strip_count: int

    def read(self, piece: str) -> Reading:
        """The text of a piece, or its byte."""
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        match = BYTE_PIECE.fullmatch(piece) if self.byte_fallback else None
        return bytes([int(match[1], 16)]) if match else piece


@dataclass(frozen=True)
class Opaque:
    """A decoder of another kind: only it can tell what its pieces say, one by one or in company."""

    decoder: tokenizers.decoders.Decoder | None

    def read(self, piece: str) -> Reading:
        """What the decoder makes of the piece alone."""
        return self.decoder.decode([piece]) if self.decoder else piece


Spelling = ByteLevel | SentencePiece | Opaque


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling:
    """Recognise the decoder of `backend`."""
    if backend.decoder is None:
        return Opaque(None)
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevel()
    return sentence_piece_steps(steps) or Opaque(backend.decoder)


def sentence_piece_steps(steps: list[dict[str, Any]]) -> SentencePiece | None:
    """The steps as a SentencePiece spelling, if they are no others than its own and in its order."""
    kinds = [step["type"] for step in steps]
    if not re.fullmatch(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?", "".join(kind + " " for kind in kinds)):
        return None
    replaced = [step for step in steps if step["type"] == "Replace"]
    strip: dict[str, Any] = steps[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strip["stop"] or any("String" not in step["pattern"] for step in replaced):
        return None
    replacements = tuple((step["pattern"]["String"], step["content"]) for step in replaced)
    return SentencePiece(replacements, "ByteFallback" in kinds, strip["content"], strip["start"])
