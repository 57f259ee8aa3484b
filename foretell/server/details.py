"""What an answer tells of its tokens and of the rounds they came in, where that is asked for."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from foretell.types import TARGET

from .answers import skip_reason
from .speedup import PlainSeconds, plain_step

if TYPE_CHECKING:
    from foretell.engine.streams import Piece, StepClock
    from foretell.tokenizer import StreamDecoder, Tokenizer
    from foretell.types import FallenGuess, TokenDetail

DIGITS = 6

Told = dict[str, list[dict[str, Any]]]


class Teller:
    """Tells of one text, piece by piece. `spelt` gives out its characters token by token, as the text itself does."""

    def __init__(
        self, tokenizer: Tokenizer, spelt: StreamDecoder, sure: Collection[str], plain_seconds: PlainSeconds
    ) -> None:
        """`sure` are the drafters whose confidence is a probability."""
        self.tokenizer, self.spelt, self.sure, self.plain_seconds = tokenizer, spelt, sure, plain_seconds
        self.kept: Told = {"token_details": [], "rounds": []}

    def keep(self, piece: Piece) -> None:
        """For an answer that is sent whole."""
        for name, rows in self.tell(piece).items():
            self.kept[name] += rows

    def tell(self, piece: Piece) -> Told:
        """What goes with a choice: a list of tokens and a list of rounds, of which a piece is one."""
        delta = piece.delta
        sure = delta.drafter in self.sure
        rows = zip(delta.tokens, delta.origins, delta.details or (), strict=True)
        tokens = [self._token(*row, sure) for row in rows]
        if delta.finish is not None and tokens:
            tokens[-1]["text"] += self.spelt.flush()
        return {"token_details": tokens, "rounds": [self._round(piece)] if tokens else []}

    def _token(self, token: int, origin: str, detail: TokenDetail, sure: bool) -> dict[str, Any]:
        return {
            "id": token,
            "text": self.spelt.push([token]),
            "origin": origin,
            **_chances(detail.probability, detail.confidence, sure),
            "rejected": [self._fallen(each, sure) for each in detail.fallen],
        }

    def _fallen(self, guess: FallenGuess, sure: bool) -> dict[str, Any]:
        spelt = self.tokenizer.token_text(guess.token)
        return {"id": guess.token, "text": spelt, **_chances(guess.probability, guess.confidence, sure)}

    def _round(self, piece: Piece) -> dict[str, Any]:
        delta = piece.delta
        accepted = sum(origin != TARGET for origin in delta.origins)
        return {
            "tokens": len(delta.tokens),
            "drafted": delta.drafted,
            "accepted": accepted,
            "drafter": delta.drafter or None,
            "skipped": None if delta.drafted else skip_reason(piece),
            **({} if piece.clock is None else self._times(piece, piece.clock)),
        }

    def _times(self, piece: Piece, clock: StepClock) -> dict[str, Any]:
        """Milliseconds of the step, and when it ended on the text's own clock."""
        began = piece.track.timings.started or clock.ended
        plain = plain_step(self.plain_seconds, clock)
        return {
            "at_ms": _ms(clock.ended - began),
            "step_ms": _ms(clock.seconds),
            "drafting_ms": _ms(clock.times.drafting),
            "target_ms": _ms(clock.times.running),
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
