"""The choice among matches: the continuation with the most expected accepted tokens (Oliaro et al. 2024)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretell.draft.ngram import SEPARATOR, Match, copy_tokens

MAX_LENGTHS = 4  # match lengths tried for a draft, longest first
RESUME_MATCH = 6  # tokens that must match before one that differs, for the copy to resume after it
RESUME_CONFIDENCE = 0.5  # factor on the confidence of such a copy


class Path(NamedTuple):
    """A candidate continuation of the tokens, with its expected accepted tokens."""

    tokens: list[int]
    confidence: list[float]  # of each token, given those before it
    score: float  # expected accepted tokens


EMPTY_PATH = Path([], [], 0.0)


@dataclass(frozen=True)
class Continuations:
    """Finds the best continuation. A match of m tokens drafts at most `factor` * m + `offset` tokens."""

    factor: float = 1.0
    offset: float = 1.0
    min_token_prob: float = 0.1  # a path less likely than this ends

    def better(self, tokens: Sequence[int], matches: list[Match], nodes: int, best: Path, skipped: int = 0) -> Path:
        """Return the better of `best` and what follows the matches; a shorter match must score higher."""
        if not matches:
            return best
        for length in sorted({match[0] for match in matches}, reverse=True)[:MAX_LENGTHS]:
            max_tokens = min(nodes, int(self.factor * length + self.offset))
            if max_tokens <= best.score:
                break
            positions = [position + skipped for matched, position in matches if matched >= length]
            path = self._follow(tokens, positions, max_tokens)
            if path.score > best.score:
                confidence = (1 - 1 / (1 + length)) * (RESUME_CONFIDENCE if skipped else 1.0)
                best = Path(path.tokens, [share * confidence for share in path.confidence], path.score)
        return best

    def _follow(self, tokens: Sequence[int], positions: list[int], max_tokens: int) -> Path:
        """Return the most frequent continuation of these positions; of equally frequent tokens the latest."""
        path: list[int] = []
        confidence: list[float] = []
        path_probability, score = 1.0, 0.0
        while len(path) < max_tokens:
            if len(positions) == 1:
                rest = copy_tokens(tokens, positions[0], max_tokens)[len(path) :]
                return Path(path + rest, confidence + [1.0] * len(rest), score + path_probability * len(rest))
            found = [_token_at(tokens, position, len(path)) for position in positions]
            token, count = max(Counter(found).items(), key=lambda vote: vote[1])
            path_probability *= count / len(positions)
            if token == SEPARATOR or path_probability < self.min_token_prob:
                break
            path.append(token)
            confidence.append(count / len(positions))
            score += path_probability
            positions = [position for position, after in zip(positions, found, strict=True) if after == token]
        return Path(path, confidence, score)


def _token_at(tokens: Sequence[int], position: int, offset: int) -> int:
    """Return the token at position + offset; past the end the copy repeats, as a loop would."""
    index, size = position + offset, len(tokens)
    return tokens[index] if index < size else tokens[position + (index - size) % (size - position)]
