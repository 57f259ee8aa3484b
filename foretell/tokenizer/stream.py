"""Text as it comes: tokens in, the characters that are certain out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from foretell.tokenizer.piece_decoding import ByteLevel, Opaque, SentencePiece
from foretell.tokenizer.tokenizer import Tokenizer

UNREADABLE = "\ufffd"


class StreamDecoder:
    """Decodes piece by piece: however the tokens are cut, the pieces and the flush together are decode() of them all.

    `context` are tokens before the first pushed one. Their text is not repeated, but a character they leave unfinished
    is finished, and a space that only the start of a text would lose stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, context: Sequence[int] = ()) -> None:
        skipped = tokenizer.special_ids if skip_special else frozenset()
        self._text = text_for(tokenizer, skipped)
        self._text.push(context)
        self._text.settle()

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        return self._text.push(tokens)

    def flush(self) -> str:
        """What is left at the end of all tokens."""
        return self._text.flush()


class Text(Protocol):
    """Text growing at its end by tokens."""

    def push(self, tokens: Sequence[int]) -> str: ...
    def settle(self) -> None: ...
    def flush(self) -> str: ...


def text_for(tokenizer: Tokenizer, skipped: frozenset[int]) -> Text:
    """The kind of text the tokenizer's decoder makes."""
    match tokenizer.spelling:
        case ByteLevel():
            return Utf8Text(tokenizer, skipped)
        case SentencePiece() as spelling:
            return RunText(tokenizer, skipped, spelling)
        case Opaque():
            return WindowText(tokenizer, skipped)


class Utf8Text:
    """For byte-level decoders, whose text is the UTF-8 reading of all bytes in a row.

    A character has at most four bytes, and whether bytes can begin one shows in themselves, so what is held back are at
    most the three last bytes. Invalid bytes come out as the same U+FFFDs here and there: both decoders put one for the
    longest beginning of a character that does not go on.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self.readings = tokenizer.readings
        self.skipped = skipped
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        """Add the tokens' bytes."""
        read = [self.readings[token] for token in tokens if token not in self.skipped]
        return self.decoder.decode(b"".join([reading for reading in read if isinstance(reading, bytes)]))

    def settle(self) -> None:
        """Nothing but the beginning of a character is ever held, and that still counts."""

    def flush(self) -> str:
        """The beginning that was held, now unreadable."""
        return self.decoder.decode(b"", final=True)


class RunText:
    """For SentencePiece decoders, where only <0xAB> pieces need company.

    The decoder reads each run of byte pieces by itself: as UTF-8 if the whole run is valid, else as one U+FFFD for each
    byte. Even valid text inside a run is thus uncertain until a piece of text ends the run, or until a byte breaks it
    for good, from where on each byte is a certain U+FFFD. Skipped tokens do not end a run: the decoder never sees them.
    A byte is held once and let go once, so a push costs what it brings and what it lets go.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], spelling: SentencePiece) -> None:
        self.readings = tokenizer.readings
        self.skipped = skipped
        self.strip_letter = spelling.strip_letter
        self.strip_count = spelling.strip_count
        self.held = bytearray()
        self.broken = False
        self.judge = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, tokens: Sequence[int]) -> str:
        """Add the tokens' texts and bytes."""
        certain: list[str] = []
        for token in tokens:
            reading = None if token in self.skipped else self.readings[token]
            if isinstance(reading, bytes):
                certain.append(self.add_byte(reading))
            elif reading is not None:
                certain += (self.end_run(), reading)
        return self.strip("".join(certain))

    def add_byte(self, byte: bytes) -> str:
        """Lengthen the run; all of it comes out if it can no longer be valid."""
        self.held += byte
        if not self.broken:
            try:
                self.judge.decode(byte)
            except UnicodeDecodeError:
                self.broken = True
        return self.let_go() if self.broken else ""

    def end_run(self) -> str:
        """What is held, read as a whole run."""
        if not self.held and not self.broken:
            return ""
        text = self.let_go()
        self.broken = False
        self.judge.reset()
        return text

    def let_go(self) -> str:
        """The text of the bytes held; none are held any more."""
        held, self.held = self.held, bytearray()
        try:
            return UNREADABLE * len(held) if self.broken else held.decode()
        except UnicodeDecodeError:
            return UNREADABLE * len(held)

    def strip(self, text: str) -> str:
        """Without the letters that the start of the whole text loses."""
        while text and self.strip_count:
            if text[0] != self.strip_letter:
                self.strip_count = 0
            else:
                text = text[1:]
                self.strip_count -= 1
        return text

    def settle(self) -> None:
        """Whole characters of a run the context ends with are the context's; its last one may be unfinished."""
        if not self.broken:
            unfinished = self.judge.getstate()[0]
            self.strip(self.held[: len(self.held) - len(unfinished)].decode())
            self.held = bytearray(unfinished)

    def flush(self) -> str:
        """The run that was going on."""
        return self.strip(self.end_run())


class WindowText:
    """For other decoders: what the last tokens say with the new ones, less what they say without.

    Exact for decoders whose text only grows at its end and where a token's text depends on the one before at most
    (Metaspace, WordPiece, suffixes, none at all). An unreadable end is held back until it is readable or too long to be
    the beginning of a character.
    """

    LOOKBACK = 4

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.skipped = skipped
        self.shown: list[int] = []
        self.waiting: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Add the tokens, unless what they say is unreadable yet."""
        self.waiting += [t for t in tokens if t not in self.skipped and self.tokenizer.piece(t) is not None]
        if len(self.waiting) < self.LOOKBACK and self.text(self.shown + self.waiting).endswith(UNREADABLE):
            return ""
        return self.flush()

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special=False)

    def settle(self) -> None:
        """What waits belongs to the context."""
        self.flush()

    def flush(self) -> str:
        """What the waiting tokens add to the ones before."""
        window = self.shown + self.waiting
        new = self.text(window)[len(self.text(self.shown)) :]
        self.shown, self.waiting = window[-self.LOOKBACK :], []
        return new
