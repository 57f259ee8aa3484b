"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.tokenizer import Tokenizer
    from foretell.types import TokenLogprob

# A token, what is known of it, and the characters it brought to the text.
Row = tuple[int, "TokenLogprob | None", int]
LEAST = -9999.0  # JSON has no infinity; OpenAI writes this for it


class LogprobWriter:
    """Writes tokens as texts, or as `token:ID` where a caller wants ids."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self.tokenizer, self.as_ids = tokenizer, as_ids

    def chat(self, rows: Sequence[TokenLogprob]) -> dict[str, Any]:
        """For a chat's choice."""
        return {"content": [self._row(row) for row in rows], "refusal": None}

    def _row(self, row: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in row.top]
        return {**self._entry(row.token, row.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelt = self.tokenizer.token_bytes(token)
        return {"token": self._text(token), "logprob": max(logprob, LEAST), "bytes": list(spelt)}

    def completion(self, rows: Sequence[Row], offset: int = 0) -> dict[str, Any]:
        """For a completion's choice; `offset` is where in the text its tokens begin."""
        lengths = [length for _, _, length in rows]
        return {
            "tokens": [self._name(token) for token, _, _ in rows],
            "token_logprobs": [None if row is None else max(row.logprob, LEAST) for _, row, _ in rows],
            "top_logprobs": [None if row is None else self._ranked(row) for _, row, _ in rows],
            "text_offset": list(accumulate(lengths, initial=offset))[:-1],
        }

    def _ranked(self, row: TokenLogprob) -> dict[str, float]:
        """The likeliest, and the token itself wherever it stands; of two that read alike the likelier counts."""
        ranked: dict[str, float] = {}
        for token, logprob in (*row.top, (row.token, row.logprob)):
            ranked.setdefault(self._name(token), max(logprob, LEAST))
        return ranked

    def _text(self, token: int) -> str:
        return f"token:{token}" if self.as_ids else self.tokenizer.token_text(token)

    def _name(self, token: int) -> str:
        """As texts, but a part of a character by its bytes: in a dictionary tokens must stay apart."""
        if self.as_ids:
            return f"token:{token}"
        spelt = self.tokenizer.token_bytes(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)
