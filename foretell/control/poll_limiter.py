"""How often a sequence is looked at: always while its guesses pay for the looks, else seldom, so that being off costs
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from foretell.types import Sequence

PATIENCE, LITTLE = 16, 3  # looks on credit; where looks have not paid lately, or a text is short
CREDIT_SHARE = 0.01  # of the time a text takes plainly may go into looks on credit
SAVINGS = 64  # looks that guesses can have earned: they come seldom and save much, and the looks between are paid by it
LONGEST_WAIT = 16  # steps between looks
RECORD = 0.02  # how fast it is learnt whether looks pay
ASK_SHARE = 0.005  # of the time may go into looks that were in vain so far,
STEP_SECONDS, TEXT_SECONDS = 5e-6, 5e-7  # and never more than this a step and a text in it
LOOK = 100  # a look costs as much as to catch up with so many tokens
PACE = 0.1  # how fast the price of a look is learnt
LEARNING = 1.7  # what guesses and drafters cost after a look: packed, judged, learnt from
LULL = 2  # so many times fewer texts at once: what was in vain in the crowd may pay now


@dataclass(slots=True)
class _Looks:
    """What looks at a sequence have earned, in looks, when it may be looked at again, and the last look."""

    credit: float = 0.0
    alarm: int = 0  # the step from which on it may be looked at
    step: int = 0
    length: int = 0  # of the text
    texts: int = 0  # written at once


class PollLimiter:
    """Each look costs its time and earns what its guesses should save. A sequence that has used up its credit is looked
    at out of a purse, which every step fills a little.

    Drafters read what was written since they were last asked, so a look costs the more the longer ago the last one was.
    In a crowd the purse keeps some sequences awake, the oldest, and lets the others sleep.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self._looks: dict[int, _Looks] = {}
        self._unit = 1e-6  # seconds to catch up with a token
        self._allowed = self._purse = self._plain = 0.0
        self._earning = 1.0  # what a look earns beyond its price, in looks, over all sequences
        self.step = self._texts = self._read = self._paid = 0
        self._began, self._woken = 0.0, False

    def due(self, seqs: list[Sequence], plain: float) -> list[Sequence]:
        """A step begins, which takes `plain` without drafts: whom to look at."""
        self._plain = plain
        self._allowed = min(ASK_SHARE * plain, STEP_SECONDS + TEXT_SECONDS * len(seqs))
        self._purse = min(self._purse + self._allowed, 2 * plain)
        self.step, self._texts, self._read, self._paid = self.step + 1, len(seqs), 0, 0
        self._began, self._woken = self.clock(), False
        step, crowd, known, found = self.step, LULL * len(seqs), self._looks, []
        for seq in seqs:
            looks = known.get(seq.id)
            if looks is None:
                looks = known[seq.id] = _Looks(self._on_credit(seq))
            elif looks.alarm > step and looks.texts < crowd:  # the usual case while drafting is off: no more than this
                continue
            if self._may_look(looks, len(seq.tokens)):
                found.append(seq)
        return found

    def _on_credit(self, seq: Sequence) -> float:
        """Looks that a text begins with."""
        if self._earning <= 0:
            return LITTLE
        time = seq.remaining_tokens * self._plain / self._texts
        return min(max(CREDIT_SHARE * time / (LOOK * self._unit), LITTLE), PATIENCE)

    def _may_look(self, looks: _Looks, length: int) -> bool:
        read = LOOK + length - looks.length
        if looks.credit <= 0:
            if looks.texts >= LULL * self._texts:
                if self._woken:  # one a step: they may have much to read
                    return False
                looks.credit, self._woken = LITTLE, True
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
        looks.credit = max(looks.credit, LITTLE)
        looks.step, looks.length, looks.texts = self.step, len(seq.tokens), self._texts

    def note(self, seq_id: int, worth: float, late: bool = False) -> None:
        """What came of a look: the seconds that its guesses should save. One that comes too late to save anything does
        not tell whether looks pay."""
        looks = self._looks[seq_id]
        earned = min(worth / (LOOK * self._unit), SAVINGS) - 1  # what comes after a look is in its price
        looks.credit = min(max(looks.credit, 0.0) + earned, SAVINGS)
        if not late:
            self._earning += RECORD * (earned - self._earning)
        looks.alarm = self.step + 1 if looks.credit > 0 else self.step + 2

    def recall(self, seq_id: int) -> None:
        """A look found something, too late: there is one more in the next step."""
        looks = self._looks[seq_id]
        looks.credit, looks.alarm = max(looks.credit, 1.0), self.step + 1

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
