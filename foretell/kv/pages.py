"""The pool that hands pages out and counts who holds them."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    """Pages are free, held by one or more sequences, or idle: held by nobody, but kept to be asked for again.

    Idle pages are given up, least recently released first, when free ones run out; `on_evict` hears of each.
    """

    def __init__(self, count: int, page_size: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.count, self.page_size = count, page_size
        self.on_evict = on_evict
        # A heap hands out the lowest page first: neighbours in a sequence then tend to be neighbours in memory.
        self._free = list(range(count))
        self._holders = [0] * count
        self._keep = [False] * count
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that can be taken now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.count - self.num_available

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill."""
        return -(-tokens // self.page_size)

    def allocate(self, pages: int) -> list[int] | None:
        """Hand out that many pages, or change nothing and say None."""
        if pages > self.num_available:
            return None
        return [self._allocate_one() for _ in range(pages)]

    def _allocate_one(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            self._keep[page] = False
            if self.on_evict:
                self.on_evict(page)
        self._holders[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """One more sequence holds `page`, which is held or idle."""
        assert self._holders[page] > 0 or page in self._idle, "a free page holds nothing to share"
        self._idle.pop(page, None)
        self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """A sequence lets go of its pages, the last one first, so that a beginning outlives what follows it."""
        for page in reversed(pages):
            assert self._holders[page] > 0, "a page is released once by each holder"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._keep[page]:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, page)

    def mark_cached(self, page: int) -> None:
        """Do not free `page` when nobody holds it any more, until its room is needed."""
        self._keep[page] = True

    def unmark_cached(self, page: int) -> None:
        """Take back `keep`."""
        self._keep[page] = False
        if page in self._idle:
            del self._idle[page]
            heapq.heappush(self._free, page)

    def check(self) -> None:
        """Every page is in just one state."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "no page is free twice"
        for page in range(self.count):
            states = (page in free) + (page in idle) + (self._holders[page] > 0)
            assert states == 1, f"page {page} is in {states} states"
