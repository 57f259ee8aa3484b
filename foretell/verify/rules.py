"""The table of verification rules, by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from foretell.errors import RequestError
from foretell.options import nearest
from foretell.types import Draft, VerifyResult

from .block import block
from .lossy import DEFAULTS, ThresholdSettings, confidence, ensemble, typical
from .rejection import rejection

if TYPE_CHECKING:
    from torch import Tensor

    from .randomness import RandomSource


class Rule(Protocol):
    """A rule that accepts draft tokens by the target's distributions `probs` [nodes + 1, vocab].

    Row 0 of `probs` follows the root, row i + 1 follows node i.
    """

    def __call__(self, draft: Draft, probs: Tensor, random: RandomSource, /) -> VerifyResult: ...


LOSSLESS = ("match", "rejection", "block")
EXACT = {"rejection": rejection, "block": block}  # lossless rules that keep the distribution, not a seed's tokens
LOSSY = {"confidence": confidence, "typical": typical, "ensemble": ensemble}


def find_rule(name: str, settings: ThresholdSettings = DEFAULTS) -> Rule:
    """Return the rule of this name that verifies by distributions; `settings` are those of the lossy rules."""
    assert name != "match", "`match` compares tokens and needs no distributions"
    if name in EXACT:
        return EXACT[name]
    if name in LOSSY:
        return partial(LOSSY[name], settings=settings)
    raise RequestError("rule", f"{name!r} is not known; {nearest(name, (*LOSSLESS, *LOSSY))}")
