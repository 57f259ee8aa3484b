"""The text of the target's tokens, told anew in another tokenizer's."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

from foretell.draft.cross_tokenizer.vocab_map import VocabMap, VocabSide

SETTLED = 64  # characters after which a text is cut where words part; what lies before is never encoded again
LONGEST = 256  # characters after which it is cut anywhere
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= [^\W\d_])")  # tokenizers cut there, too
ANCHOR = "\n"  # stands before a text where a tokenizer would put a space


class Speller:
    """Encodes pieces of a running text: no BOS inside it, no space before it, no special token by its name."""

    def __init__(self, side: VocabSide) -> None:
        self.side, self.tokenizer = side, side.tokenizer
        self.adds_space = b"".join(map(self.tokenizer.token_bytes, self._encode("a"))) == b" a"
        self.anchor = self._encode(ANCHOR)

    def opening(self, text: str) -> list[int]:
        """The tokens of a text's beginning, less BOS."""
        return self._plain(text, self._encode(text))

    def inside(self, text: str) -> list[int]:
        """The tokens of what stands in the middle of a text."""
        if not self.adds_space:
            return self.opening(text)
        tokens, size = self._encode(ANCHOR + text), len(self.anchor)
        return self._plain(text, tokens[size:] if tokens[:size] == self.anchor else self._encode(text))

    def _plain(self, text: str, tokens: list[int]) -> list[int]:
        """Without special tokens that the text only seems to name: such a name is encoded in two halves."""
        special = [self.tokenizer.piece(token) or "" for token in tokens if token in self.side.special]
        cut = next((text.index(name) + 1 for name in special if name in text), 0)
        return self.inside(text[:cut]) + self.inside(text[cut:]) if 0 < cut < len(text) else tokens

    def _encode(self, text: str) -> list[int]:
        """A token that the tokenizer has and its model has not is left out."""
        return [token for token in self.tokenizer.encode(text, add_special=False) if token < self.side.size]


class Utf8Buffer:
    """Bytes as they come, read as UTF-8; the beginning of a character is held until the rest of it comes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, said: bytes) -> str:
        return self._decoder.decode(said)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def whole(self) -> bool:
        """Whether nothing is held."""
        return not self._decoder.getstate()[0]


@dataclass
class AlignedText:
    """One text in the draft's tokens: a value of the target's tokens alone, however they came.

    Where it is cut depends on the text up to there and on a character more, so what is settled stays, and only the
    tail is encoded anew when the text grows. A special token that the draft has no counterpart for, as the marks of
    another chat template, is told by its name, as text.
    """

    vocabularies: VocabMap
    speller: Speller  # of the draft
    strips: bool = False  # whether the text to come begins with a space that the target put there
    read: int = 0  # the target's tokens, which only ever grow
    settled: list[int] = field(default_factory=list)
    tail: str = ""
    opened: bool = False  # whether some of the text is settled
    words: Utf8Buffer = field(default_factory=Utf8Buffer)

    def __post_init__(self) -> None:
        self.settled += self.vocabularies.draft.start

    @property
    def aligned(self) -> bool:
        """Whether the target's tokens end where a character does."""
        return self.words.whole

    def follow(self, tokens: list[int]) -> None:
        """Go on with what was written since."""
        for token in tokens[self.read :]:
            self._add(token)
            self.read += 1
        self._settle()

    def since(self, place: int) -> list[int]:
        """The draft's tokens from a settled place on."""
        return self.settled[place:] + self._encode(self.tail)

    def _add(self, token: int) -> None:
        target, marks = self.vocabularies.target, self.vocabularies.marks
        if token not in target.special:
            self._write(self.words.push(target.tokenizer.token_bytes(token)))
        elif token in marks:
            self._write(self.words.flush())
            self._settle()
            self._move(len(self.tail))
            self.settled.append(marks[token])
        elif self.read or token not in target.start:  # the draft begins in its own way
            self._write(self.words.flush() + (target.tokenizer.piece(token) or ""))

    def _write(self, text: str) -> None:
        self.tail += text.removeprefix(" ") if self.strips else text
        self.strips = self.strips and not text

    def _settle(self) -> None:
        while cut := self._cut():
            self._move(cut)

    def _cut(self) -> int:
        between = BETWEEN_WORDS.search(self.tail, SETTLED, LONGEST + 2)
        return between.start() if between else LONGEST if len(self.tail) > LONGEST + 1 else 0

    def _move(self, cut: int) -> None:
        if cut:
            self.settled += self._encode(self.tail[:cut])
            self.tail, self.opened = self.tail[cut:], True

    def _encode(self, text: str) -> list[int]:
        return self.speller.inside(text) if self.opened else self.speller.opening(text)
