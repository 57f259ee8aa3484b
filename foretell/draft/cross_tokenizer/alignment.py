"""Re-encodes the target's tokens with the draft model's tokenizer, incrementally."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

from foretell.draft.cross_tokenizer.vocab_map import VocabMap, VocabSide

MIN_SEGMENT = 64  # characters after which the text is cut at the next word boundary and never encoded again
MAX_SEGMENT = 256  # characters after which it is cut anywhere
WORD_BOUNDARY = re.compile(r"(?<=\S)(?= [^\W\d_])")  # tokenizers split there as well
ANCHOR = "\n"  # put before a text whose tokenizer would otherwise add a space


class TextEncoder:
    """Encodes parts of a text: without BOS, without an added space, and special tokens only as plain text."""

    def __init__(self, side: VocabSide) -> None:
        self.side, self.tokenizer = side, side.tokenizer
        self.adds_space = b"".join(map(self.tokenizer.token_bytes, self._encode("a"))) == b" a"
        self.anchor = self._encode(ANCHOR)

    def encode_start(self, text: str) -> list[int]:
        """Encode the start of a text, without BOS."""
        return self._without_special(text, self._encode(text))

    def encode_inside(self, text: str) -> list[int]:
        """Encode a part from the middle of a text."""
        if not self.adds_space:
            return self.encode_start(text)
        tokens, size = self._encode(ANCHOR + text), len(self.anchor)
        return self._without_special(text, tokens[size:] if tokens[:size] == self.anchor else self._encode(text))

    def _without_special(self, text: str, tokens: list[int]) -> list[int]:
        """Encode the name of a special token that occurs in the text in two halves, so that it stays plain text."""
        special = [self.tokenizer.piece(token) or "" for token in tokens if token in self.side.special]
        cut = next((text.index(name) + 1 for name in special if name in text), 0)
        return self.encode_inside(text[:cut]) + self.encode_inside(text[cut:]) if 0 < cut < len(text) else tokens

    def _encode(self, text: str) -> list[int]:
        """Encode without special tokens, and without tokens that the tokenizer has and its model lacks."""
        return [token for token in self.tokenizer.encode(text, add_special=False) if token < self.side.size]


class Utf8Buffer:
    """An incremental UTF-8 decoder that holds back incomplete characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def is_empty(self) -> bool:
        """Return whether no incomplete character is held back."""
        return not self._decoder.getstate()[0]


@dataclass
class AlignedText:
    """A sequence in the draft model's tokens, as a function of the target's tokens alone.

    Where the text is cut depends on the text up to there and one character more. So the tokens before the cut are
    stable, and only the tail is encoded again when the text grows. A special token of the target without a counterpart,
    such as a marker of another chat template, is spelled out as text.
    """

    vocab_map: VocabMap
    encoder: TextEncoder  # with the draft model's tokenizer
    strips_space: bool = False  # the text starts with a space that the target's tokenizer added
    num_read: int = 0  # target tokens read so far; never shrinks
    stable_tokens: list[int] = field(default_factory=list)
    tail: str = ""  # text after the stable tokens
    has_stable_text: bool = False
    buffer: Utf8Buffer = field(default_factory=Utf8Buffer)

    def __post_init__(self) -> None:
        self.stable_tokens += self.vocab_map.draft.start

    @property
    def ends_on_character(self) -> bool:
        """Return whether the target's tokens end on a complete character."""
        return self.buffer.is_empty

    def append(self, tokens: list[int]) -> None:
        """Read the tokens of the sequence that are new."""
        for token in tokens[self.num_read :]:
            self._append(token)
            self.num_read += 1
        self._stabilize()

    def tokens_from(self, start: int) -> list[int]:
        """Return the draft model's tokens from a stable index to the end."""
        return self.stable_tokens[start:] + self._encode(self.tail)

    def _append(self, token: int) -> None:
        target, special = self.vocab_map.target, self.vocab_map.special
        if token not in target.special:
            self._append_text(self.buffer.push(target.tokenizer.token_bytes(token)))
        elif token in special:
            self._append_text(self.buffer.flush())
            self._stabilize()
            self._move_to_stable(len(self.tail))
            self.stable_tokens.append(special[token])
        elif self.num_read or token not in target.start:  # the draft model has its own start tokens
            self._append_text(self.buffer.flush() + (target.tokenizer.piece(token) or ""))

    def _append_text(self, text: str) -> None:
        self.tail += text.removeprefix(" ") if self.strips_space else text
        self.strips_space = self.strips_space and not text

    def _stabilize(self) -> None:
        while cut := self._next_cut():
            self._move_to_stable(cut)

    def _next_cut(self) -> int:
        """Return where the tail is cut next, or 0."""
        boundary = WORD_BOUNDARY.search(self.tail, MIN_SEGMENT, MAX_SEGMENT + 2)
        if boundary:
            return boundary.start()
        return MAX_SEGMENT if len(self.tail) > MAX_SEGMENT + 1 else 0

    def _move_to_stable(self, length: int) -> None:
        if length:
            self.stable_tokens += self._encode(self.tail[:length])
            self.tail, self.has_stable_text = self.tail[length:], True

    def _encode(self, text: str) -> list[int]:
        return self.encoder.encode_inside(text) if self.has_stable_text else self.encoder.encode_start(text)
