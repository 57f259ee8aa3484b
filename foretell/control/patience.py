"""How often a sequence is looked at whose guesses do not pay: less and less, so that being off costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from foretell.types import Sequence

PATIENCE, LONGEST_WAIT = 16, 16  # looks in vain until a sequence is looked at less often, and how seldom at last
ASK_SHARE = 0.005  # of the time may go into looks that were in vain so far,
STEP_SECONDS, TEXT_SECONDS = 8e-6, 5e-7  # and never more than this a step and a text in it
LOOK = 24  # a look costs as much as to catch up with so many tokens
PACE = 0.1  # how fast the price of a look is learnt
LEARNING = 1.3  # what drafters learn after a look costs, too
LULL = 2  # so many times fewer texts at once: what was in vain in the crowd may pay now


@dataclass(slots=True)
class _Looks:
    """How often a sequence was looked at in vain, when it may be again, and the last look."""

    vain: int = 0
    alarm: int = 0  # the step from which on it may be looked at
    step: int = 0
    length: int = 0  # of the text
    texts: int = 0  # written at once


class Patience:
    """Counts looks in vain and pays for more of them out of a purse, which every step fills a little.

    Drafters read what was written since they were last asked, so a look costs the more the longer ago the last one was.
    In a crowd the purse keeps some sequences awake, the oldest, and lets the others sleep.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self._looks: dict[int, _Looks] = {}
        self._unit = 5e-6  # seconds to catch up with a token
        self._allowed = self._purse = 0.0
        self.step = self._texts = self._read = self._paid = 0
        self._began, self._woken = 0.0, False

    def due(self, seqs: list[Sequence], plain: float) -> list[Sequence]:
        """A step begins, which takes `plain` without drafts: whom to look at."""
        self._allowed = min(ASK_SHARE * plain, STEP_SECONDS + TEXT_SECONDS * len(seqs))
        self._purse = min(self._purse + self._allowed, 2 * plain)
        self.step, self._texts, self._read, self._paid = self.step + 1, len(seqs), 0, 0
        self._began, self._woken = self.clock(), False
        step, crowd, known, found = self.step, LULL * len(seqs), self._looks, []
        for seq in seqs:
            looks = known.get(seq.id)
            if looks is None:
                looks = known[seq.id] = _Looks()
            elif looks.alarm > step and looks.texts < crowd:  # the usual case while drafting is off: no more than this
                continue
            if self._may_look(looks, len(seq.tokens)):
                found.append(seq)
        return found

    def _may_look(self, looks: _Looks, length: int) -> bool:
        read = LOOK + length - looks.length
        if looks.vain > PATIENCE:
            if looks.texts >= LULL * self._texts:
                if self._woken:  # one a step: they may have much to read
                    return False
                looks.vain, self._woken = 0, True
            elif (missing := self._unit * (self._paid + read) - self._purse) > 0:
                looks.alarm = self.step + 1 + min(LONGEST_WAIT, int(missing / max(self._allowed, 1e-9)))
                return False
            else:
                self._paid += read
        self._read += read
        looks.step, looks.length, looks.texts = self.step, length, self._texts
        return True

    def wake(self, seq: Sequence) -> None:
        """Look at a sequence in this step whatever it costs."""
        looks = self._looks[seq.id]
        looks.vain, looks.step, looks.length, looks.texts = 0, self.step, len(seq.tokens), self._texts

    def note(self, seq_id: int, worth: float) -> None:
        """What came of a look: the seconds that its guesses should save. Less than the look costs is in vain, too."""
        looks = self._looks[seq_id]
        looks.vain = 0 if worth > LEARNING * LOOK * self._unit else looks.vain + 1
        looks.alarm = self.step + 1 + (min(LONGEST_WAIT, looks.vain // PATIENCE) if looks.vain > PATIENCE else 0)

    def done(self) -> None:
        """All looks of the step are taken: pay what they took."""
        if self._read:
            unit = LEARNING * (self.clock() - self._began) / self._read
            self._unit += PACE * (unit - self._unit)
            self._purse -= unit * self._paid

    def left_alone(self, seq_id: int) -> bool:
        """Whether a sequence that writes was not looked at in this step."""
        looks = self._looks.get(seq_id)
        return looks is not None and looks.step != self.step

    def forget(self, seq_id: int) -> None:
        self._looks.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._looks)
