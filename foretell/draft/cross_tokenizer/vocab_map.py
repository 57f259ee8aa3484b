"""Maps between two vocabularies: shared tokens, and how similarly the two tokenizers split text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from foretell.tokenizer import Tokenizer
from foretell.tokenizer.piece_decoding import OpaqueDecoding

# Sample text to compare tokenizers on: prose, numbers, a list, a dialogue, code.
SAMPLE = """The house stood at the end of a narrow lane, half hidden by apple trees that nobody had pruned for years. In
spring the whole garden turned white, and people from the village came to look over the wall. Mrs. Carter, who was
eighty-one, didn't mind them at all; she said that flowers were meant to be seen. "Come in," she called, "and mind
the step!" By 1987 the roof was leaking in three places, and repairs would have cost about $12,500.

Photosynthesis converts light into chemical energy. Plants, algae and some bacteria absorb carbon dioxide and water,
and release oxygen as a by-product. The process has two stages:
- the light-dependent reactions, which take place in the thylakoid membranes;
- the Calvin cycle, which produces glucose in the surrounding stroma.

How many people live there? According to the latest estimates, roughly 4.7 million, although the government believes
that the real number could be considerably higher. Researchers at the university are currently investigating it.

def mean(values: list[float]) -> float:
    \"\"\"The average, or 0.0 for an empty list.\"\"\"
    if not values:
        return 0.0
    return sum(values) / len(values)
"""

MIN_AGREEMENT = 0.8  # share of equal token spans above which sampled requests draft by tokens

Method = Literal["tokens", "strings"]


@dataclass(frozen=True)
class VocabSide:
    """A tokenizer and the vocabulary size of its model; either may have tokens that the other lacks."""

    tokenizer: Tokenizer
    size: int

    @property
    def start(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before every text: BOS or none."""
        first = self.tokenizer.encode("a")[0]
        return (first,) if first == self.tokenizer.bos_id and first < self.size else ()

    @property
    def ordinary(self) -> Iterator[int]:
        """Tokens that stand for text."""
        return (token for token in range(min(self.size, self.tokenizer.vocab_size)) if token not in self.special)

    @property
    def special(self) -> frozenset[int]:
        """Return the ids of the special tokens."""
        return self.tokenizer.special_ids

    @property
    def markers(self) -> list[int]:
        """Special tokens that neither start nor end a text."""
        ends = self.tokenizer.end_ids | set(self.start)
        return [token for token in sorted(self.special - ends) if token < self.size]

    @property
    def ends(self) -> list[int]:
        """End tokens that the model has."""
        return [token for token in sorted(self.tokenizer.end_ids) if token < self.size]

    def ends_turn(self, end: int) -> bool:
        """Return whether the chat template uses this end token."""
        return (self.tokenizer.piece(end) or "") in (self.tokenizer.chat_template or "")


@dataclass(frozen=True)
class VocabMap:
    """The vocabularies of a target and of a draft model, and the tokens they share."""

    target: VocabSide
    draft: VocabSide
    to_target: Mapping[int, int]  # draft tokens with an equal target token
    to_draft: Mapping[int, int]  # the inverse
    special: Mapping[int, int]  # special target tokens and the draft tokens with the same role
    agreement: float  # share of the target's token spans on sample text that the draft's tokenizer has as well
    draft_tokens_per_target_token: float  # mean over sample text

    @classmethod
    def of(cls, target: VocabSide, draft: VocabSide) -> VocabMap:
        """Build the map from ordinary tokens with the same bytes and special tokens with the same role."""
        to_target = shared_tokens(target, draft) | match_special(draft, target)
        to_draft = {target_token: draft_token for draft_token, target_token in to_target.items()}
        target_spans, draft_spans = spans(target.tokenizer), spans(draft.tokenizer)
        return cls(
            target=target,
            draft=draft,
            to_target=to_target,
            to_draft=to_draft,
            special=match_special(target, draft),
            agreement=len(target_spans & draft_spans) / len(target_spans),
            draft_tokens_per_target_token=len(draft_spans) / len(target_spans),
        )

    @property
    def method(self) -> Method:
        """Return how to draft sampled requests: by tokens, or by strings if the tokenizers differ too much."""
        return "tokens" if self.agreement > MIN_AGREEMENT else "strings"

    @property
    def summary(self) -> str:
        """Describe how drafts are translated, and why."""
        shared = f"{self.agreement:.0%} of sample text is split alike"
        if self.method == "strings":
            return f"{shared}, so drafts are generated as text and encoded again"
        count = len(self.to_target)
        return f"{shared}, so drafts are sampled from the {count} shared tokens; greedy drafts are encoded again"


def shared_tokens(target: VocabSide, draft: VocabSide) -> dict[int, int]:
    """Map ordinary draft tokens one to one to the target tokens with the same bytes."""
    by_bytes = tokens_by_bytes(target)
    return {token: by_bytes[data] for data, token in tokens_by_bytes(draft).items() if data in by_bytes}


def tokens_by_bytes(side: VocabSide) -> dict[bytes, int]:
    """Return ordinary tokens by their bytes; of two equal ones, a text token is preferred to a byte-fallback token."""
    found: dict[bytes, int] = {}
    for token in side.ordinary:
        data = side.tokenizer.token_bytes(token)
        if data and (data not in found or is_byte_fallback(side.tokenizer, found[data])):
            found[data] = token
    return found


def is_byte_fallback(tokenizer: Tokenizer, token: int) -> bool:
    """Return whether a token is a single byte that the tokenizer falls back to."""
    return (tokenizer.piece(token) or "").startswith("<0x")


def match_special(one: VocabSide, other: VocabSide) -> dict[int, int]:
    """Map special tokens by role: end tokens whatever their names, other markers by name."""
    names = {other.tokenizer.piece(token): token for token in other.markers}
    same = {token: names[name] for token in one.markers if (name := one.tokenizer.piece(token)) in names}
    return same | {end: match_end(one.ends_turn(end), other) for end in one.ends if other.ends}


def match_end(ends_turn: bool, other: VocabSide) -> int:
    """Return the other side's end of turn or end of text, whichever is asked for, or the one it has."""
    alike = [end for end in other.ends if other.ends_turn(end) == ends_turn]
    return (alike or other.ends)[0]


def first_difference(target: Tokenizer, draft: Tokenizer) -> int | None:
    """Return the first token that differs; names of special tokens and tokens of only one side do not count."""
    for token in range(min(target.vocab_size, draft.vocab_size)):
        special = token in target.special_ids and token in draft.special_ids
        if not special and target.piece(token) != draft.piece(token):
            return token
    return None


def is_readable(tokenizer: Tokenizer) -> bool:
    """Return whether a token has the same text whatever tokens surround it."""
    return not isinstance(tokenizer.piece_decoding, OpaqueDecoding)


def keeps_text(tokenizer: Tokenizer) -> bool:
    """Return whether encoding is lossless on sample text: nothing is lower-cased or unknown."""
    return tokenizer.decode(tokenizer.encode(SAMPLE, add_special=False)) == SAMPLE


def spans(tokenizer: Tokenizer, text: str = SAMPLE) -> set[tuple[int, int]]:
    """Return the byte ranges of all tokens, counted from the end: some tokenizers add a space at the start."""
    ranges, start = set(), 0
    for token in reversed(tokenizer.encode(text, add_special=False)):
        size = len(tokenizer.token_bytes(token))
        ranges.add((start, start + size))
        start += size
    return ranges
