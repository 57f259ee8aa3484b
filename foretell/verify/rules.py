"""The rules by name."""

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
    """Which guesses stand, by the target's distributions [nodes + 1, vocab]: row 0 after the root, i + 1 after i."""

    def __call__(self, draft: Draft, probs: Tensor, chance: RandomSource, /) -> VerifyResult: ...


LOSSLESS = ("match", "rejection", "block")
EXACT = {"rejection": rejection, "block": block}
LOSSY = {"confidence": confidence, "typical": typical, "ensemble": ensemble}


def find_rule(name: str, settings: ThresholdSettings = DEFAULTS) -> Rule:
    """The rule of this name that judges by distributions."""
    assert name != "match", "`match` walks the target's own tokens and needs no distributions"
    if name in EXACT:
        return EXACT[name]
    if name in LOSSY:
        return partial(LOSSY[name], settings=settings)
    raise RequestError("rule", f"{name!r} is not known; {nearest(name, (*LOSSLESS, *LOSSY))}")
