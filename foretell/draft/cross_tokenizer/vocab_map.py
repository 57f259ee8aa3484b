"""Two tokenizers side by side: which of their tokens say the same, and how alike they cut a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from foretell.tokenizer import Tokenizer
from foretell.tokenizer.piece_decoding import OpaqueDecoding

# Ordinary text, for measuring: prose, numbers, a list, a dialogue, code.
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

ENOUGH = 0.8  # agreement from which on tokens are translated one by one

Way = Literal["tokens", "strings"]


@dataclass(frozen=True)
class VocabSide:
    """One model's tokenizer, and how many tokens the model itself has: either may know some that the other does not."""

    tokenizer: Tokenizer
    size: int

    @property
    def start(self) -> tuple[int, ...]:
        """What the tokenizer puts before every text: BOS or nothing."""
        first = self.tokenizer.encode("a")[0]
        return (first,) if first == self.tokenizer.bos_id and first < self.size else ()

    @property
    def ordinary(self) -> Iterator[int]:
        """The tokens that stand for text."""
        return (token for token in range(min(self.size, self.tokenizer.vocab_size)) if token not in self.special)

    @property
    def special(self) -> frozenset[int]:
        return self.tokenizer.special_ids

    @property
    def marks(self) -> list[int]:
        """The special tokens that neither begin nor end a text."""
        ends = self.tokenizer.end_ids | set(self.start)
        return [token for token in sorted(self.special - ends) if token < self.size]

    @property
    def ends(self) -> list[int]:
        return [token for token in sorted(self.tokenizer.end_ids) if token < self.size]

    def ends_turn(self, end: int) -> bool:
        """Whether chats are written with this end."""
        return (self.tokenizer.piece(end) or "") in (self.tokenizer.chat_template or "")


@dataclass(frozen=True)
class VocabMap:
    """A target's tokens and a draft's, and those they have in common."""

    target: VocabSide
    draft: VocabSide
    to_target: Mapping[int, int]  # of the draft's tokens, those that say what a token of the target says
    to_draft: Mapping[int, int]  # the same the other way
    marks: Mapping[int, int]  # special tokens of the target and those of the draft with the same part to play
    agreement: float  # the share of the target's tokens of ordinary text that the draft cuts the same
    spread: float  # how many of the draft's tokens say what one of the target's does

    @classmethod
    def of(cls, target: VocabSide, draft: VocabSide) -> VocabMap:
        to_target = shared_tokens(target, draft) | shared_marks(draft, target)
        to_draft = {ours: theirs for theirs, ours in to_target.items()}
        ours, theirs = spans(target.tokenizer), spans(draft.tokenizer)
        alike, spread = len(ours & theirs) / len(ours), len(theirs) / len(ours)
        return cls(target, draft, to_target, to_draft, shared_marks(target, draft), alike, spread)

    @property
    def way(self) -> Way:
        """How sampled text is guessed: token by token, or as strings where the two cut it too differently."""
        return "tokens" if self.agreement > ENOUGH else "strings"

    @property
    def in_words(self) -> str:
        """How guesses are carried over, and why."""
        alike = f"{self.agreement:.0%} of ordinary text is cut the same"
        if self.way == "strings":
            return f"{alike}, so it writes text that is encoded anew"
        return f"{alike}, so it draws from the {len(self.to_target)} tokens both have, and greedy text is encoded anew"


def shared_tokens(target: VocabSide, draft: VocabSide) -> dict[int, int]:
    """The draft's ordinary tokens that have the same bytes as one of the target's; one to one."""
    ours = tokens_by_bytes(target)
    return {token: ours[said] for said, token in tokens_by_bytes(draft).items() if said in ours}


def tokens_by_bytes(side: VocabSide) -> dict[bytes, int]:
    """Each ordinary token by what it says; of two that say the same, a piece of text goes before a lone byte."""
    found: dict[bytes, int] = {}
    for token in side.ordinary:
        said = side.tokenizer.token_bytes(token)
        if said and (said not in found or is_lone_byte(side.tokenizer, found[said])):
            found[said] = token
    return found


def is_lone_byte(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is a byte that the tokenizer falls back to."""
    return (tokenizer.piece(token) or "").startswith("<0x")


def shared_marks(one: VocabSide, other: VocabSide) -> dict[int, int]:
    """Special tokens by the part they play: ends whatever they are called, marks without such a role by name."""
    names = {other.tokenizer.piece(token): token for token in other.marks}
    same = {token: names[name] for token in one.marks if (name := one.tokenizer.piece(token)) in names}
    return same | {end: match_end(one.ends_turn(end), other) for end in one.ends if other.ends}


def match_end(ends_turn: bool, other: VocabSide) -> int:
    """Its end of a turn, or its end of all text; what there is if not both."""
    alike = [end for end in other.ends if other.ends_turn(end) == ends_turn]
    return (alike or other.ends)[0]


def first_difference(target: Tokenizer, draft: Tokenizer) -> int | None:
    """The first token that is not the same in both; names of special tokens and what only one of them has count not."""
    for token in range(min(target.vocab_size, draft.vocab_size)):
        special = token in target.special_ids and token in draft.special_ids
        if not special and target.piece(token) != draft.piece(token):
            return token
    return None


def is_readable(tokenizer: Tokenizer) -> bool:
    """Whether a token's text can be told without the tokens around it."""
    return not isinstance(tokenizer.piece_decoding, OpaqueDecoding)


def keeps_text(tokenizer: Tokenizer) -> bool:
    """Whether ordinary text comes back as it was: nothing put in lower case, nothing unknown."""
    return tokenizer.decode(tokenizer.encode(SAMPLE, add_special=False)) == SAMPLE


def spans(tokenizer: Tokenizer, text: str = SAMPLE) -> set[tuple[int, int]]:
    """Where tokens begin and end, in bytes from the text's end: at its beginning some tokenizers put a space."""
    places, place = set(), 0
    for token in reversed(tokenizer.encode(text, add_special=False)):
        size = len(tokenizer.token_bytes(token))
        places.add((place, place + size))
        place += size
    return places
