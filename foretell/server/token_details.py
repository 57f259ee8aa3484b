"""What an answer tells of its tokens and of the rounds they came in, where that is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from foretell.types import TARGET

from .choice_state import skip_reason
from .speedup import PlainSeconds, plain_step

if TYPE_CHECKING:
    from foretell.engine.streams import StepTiming, StreamItem
    from foretell.server.openai.requests import Generation
    from foretell.tokenizer import StreamDecoder, Tokenizer
    from foretell.types import Delta, RejectedToken, TokenDetail

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
            **({} if piece.timing is None else self._times(piece, piece.timing)),
        }

    def _times(self, piece: StreamItem, clock: StepTiming) -> dict[str, Any]:
        """Milliseconds of the step, and when it ended on the text's own clock."""
        began = piece.state.timings.started or clock.ended_at
        plain = plain_step(self.plain_seconds, clock)
        return {
            "at_ms": _ms(clock.ended_at - began),
            "step_ms": _ms(clock.seconds),
            "drafting_ms": _ms(clock.times.draft_seconds),
            "target_ms": _ms(clock.times.target_seconds),
            "plain_ms": None if plain is None else _ms(plain),
            "texts": clock.num_sequences,
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
