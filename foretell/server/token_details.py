"""What an answer tells of its tokens and of the rounds they came in, where that is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from foretell.server.choice_state import skip_reason
from foretell.server.metrics import PlainSeconds, plain_step
from foretell.types import TARGET

if TYPE_CHECKING:
    from foretell.engine.streams import StepClock, StreamItem
    from foretell.server.openai.requests import Generation
    from foretell.tokenizer import StreamDecoder, Tokenizer
    from foretell.types import Delta, RejectedToken, TokenDetail, TokenLogprob

DIGITS = 6

Told = dict[str, list[Any]]


class TokenDetailWriter:
    """Tells of one text, piece by piece, what its request wants to know."""

    def __init__(
        self,
        body: Generation,
        tokenizer: Tokenizer,
        spelt: StreamDecoder,
        sure: Collection[str],
        plain_seconds: PlainSeconds,
    ) -> None:
        """`spelt` gives out the text token by token; `sure` are the drafters whose confidence is a probability."""
        self.body, self.tokenizer, self.spelt = body, tokenizer, spelt
        self.sure, self.plain_seconds = sure, plain_seconds
        self.kept: Told = defaultdict(list)

    def keep(self, piece: StreamItem) -> None:
        """For an answer that is sent whole."""
        for name, rows in self.tell(piece).items():
            self.kept[name] += rows

    def tell(self, piece: StreamItem) -> Told:
        """What goes with a choice. A piece is one round."""
        delta, body, found = piece.delta, self.body, dict[str, list[Any]]()
        texts = self._texts(delta)
        if body.return_token_origin:
            found |= {"token_ids": list(delta.tokens), "token_origins": list(delta.origins), "token_texts": texts}
        if body.return_token_details:
            sure = delta.drafter in self.sure
            rows = zip(delta.tokens, texts, delta.origins, delta.details or (), strict=True)
            found["token_details"] = [self._token(*row, sure) for row in rows]
        if body.return_rounds or body.return_token_details:
            found["rounds"] = [self._round(piece)] if delta.tokens else []
        return found

    def _texts(self, delta: Delta) -> list[str]:
        """The characters each token brought; what its end leaves of one goes with the last token."""
        texts = [self.spelt.push([token]) for token in delta.tokens]
        if delta.finish_reason is not None and texts:
            texts[-1] += self.spelt.flush()
        return texts

    def _token(self, token: int, text: str, origin: str, detail: TokenDetail, sure: bool) -> dict[str, Any]:
        return {
            "id": token,
            "text": text,
            "origin": origin,
            **_chances(detail.probability, detail.confidence, sure),
            "rejected": [self._fallen(each, sure) for each in detail.rejected],
        }

    def _fallen(self, guess: RejectedToken, sure: bool) -> dict[str, Any]:
        spelt = self.tokenizer.token_text(guess.token)
        return {"id": guess.token, "text": spelt, **_chances(guess.probability, guess.confidence, sure)}

    def _round(self, piece: StreamItem) -> dict[str, Any]:
        delta = piece.delta
        return {
            "tokens": len(delta.tokens),
            "drafted": delta.num_drafted,
            "accepted": sum(origin != TARGET for origin in delta.origins),
            "drafter": delta.drafter or None,
            "skipped": None if delta.num_drafted else skip_reason(piece),
            **({} if piece.clock is None else self._times(piece, piece.clock)),
        }

    def _times(self, piece: StreamItem, clock: StepClock) -> dict[str, Any]:
        """Milliseconds of the step, and when it ended on the text's own clock."""
        began = piece.track.timings.started or clock.ended
        plain = plain_step(self.plain_seconds, clock)
        return {
            "at_ms": _ms(clock.ended - began),
            "step_ms": _ms(clock.seconds),
            "drafting_ms": _ms(clock.times.draft_seconds),
            "target_ms": _ms(clock.times.target_seconds),
            "plain_ms": None if plain is None else _ms(plain),
            "texts": clock.texts,
        }


def _chances(target: float, confidence: float | None, sure: bool) -> dict[str, Any]:
    """The target's probability, how sure the drafter was, and whether that is the probability it guessed with."""
    found = _rounded(confidence)
    return {
        "probability": _rounded(target),
        "draft_confidence": found,
        "draft_probability": found if sure else None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


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
