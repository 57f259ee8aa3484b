"""Which replica has read how a prompt begins, and whether it is worth going there."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence

MOST_MARKS = 100_000  # about 25 MB; the ones unused for longest are forgotten
HOLDERS = 3  # replicas kept for one beginning, such as an instruction that all conversations share


class Affinity:
    """Remembers where beginnings were read. It may be wrong: a replica that has forgotten reads again."""

    def __init__(self, routing: str = "prefix", slack: int = 4, most: int = MOST_MARKS, seed: int = 0) -> None:
        """`slack`: requests by which a replica may be busier than the least loaded and still be gone to."""
        self.routing, self.slack, self.most = routing, slack, most
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._turns: dict[str, int] = {}  # when each was last gone to, so that equals take turns
        self._turn = 0
        self._dice = random.Random(seed)

    def __len__(self) -> int:
        return len(self._holders)

    def order(self, marks: Sequence[bytes], loads: Mapping[str, int], avoid: Sequence[str] = ()) -> list[str]:
        """The replicas of `loads`, the one to go to first; those to `avoid` come last."""
        names = sorted(loads, key=lambda name: (name in avoid, loads[name], self._turns.get(name, 0)))
        if self.routing == "random":
            self._dice.shuffle(names)
            names.sort(key=lambda name: name in avoid)
        if self.routing == "prefix":
            reader = self._reader(marks, loads, avoid)
            names.sort(key=lambda name: name != reader)
        return names

    def _reader(self, marks: Sequence[bytes], loads: Mapping[str, int], avoid: Sequence[str]) -> str | None:
        """Who has read most of the prompt and is not much busier than the others."""
        limit = min(loads.values(), default=0) + self.slack
        for mark in reversed(marks):
            able = [n for n in self._holders.get(mark, ()) if loads.get(n, limit + 1) <= limit and n not in avoid]
            if able:
                return min(able, key=lambda name: loads[name])
        return None

    def remember(self, marks: Sequence[bytes], name: str) -> None:
        """A request with these marks went to `name`."""
        self._turn += 1
        self._turns[name] = self._turn
        if self.routing != "prefix":
            return
        for mark in marks:
            others = [each for each in self._holders.pop(mark, ()) if each != name]
            self._holders[mark] = (name, *others)[:HOLDERS]
        while len(self._holders) > self.most:
            self._holders.popitem(last=False)

    def keep_only(self, names: Sequence[str]) -> None:
        """Others have gone; what is known of their marks fades by itself."""
        self._turns = {name: turn for name, turn in self._turns.items() if name in names}
