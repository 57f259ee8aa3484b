"""Drafts by a variant of the target itself, over the target's own keys and values."""

from __future__ import annotations

from foretell.types import Sequence

from .model import ModelDrafter


class SelfDrafter(ModelDrafter):
    """Reads the target's pages for what is cached and writes behind it; the check that follows writes over that.

    It keeps nothing of its own: pages for a step's guesses are reserved with the step, and what a draft left there is
    rewritten by the target before the target reads it.
    """

    reads = False

    def _catch_up(self, seq: Sequence) -> Sequence:
        shadow = self._shadow(seq).seq
        shadow.tokens, shadow.cached, shadow.pages = list(seq.tokens), seq.cached, seq.pages
        return shadow

    def _reserve(self, shadow: Sequence, tokens: int, keep: set[int]) -> bool:
        return self.runner.pool.pages_for(tokens) <= len(shadow.pages)

    def forget(self, seq: Sequence) -> None:
        self._shadows.pop(seq.id, None)  # the pages are the target's, who gives them back itself
