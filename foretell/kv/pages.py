"""The page pool of the KV cache, with reference counts."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    """A pool of pages that are free, held by one or more sequences, or idle: not held, but cached for prefix reuse.

    When free pages run out, idle ones are evicted, least recently released first; `on_evict` is called for each.
    """

    def __init__(self, count: int, page_size: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.count, self.page_size = count, page_size
        self.on_evict = on_evict
        # A heap allocates the lowest page first, so that consecutive pages of a sequence tend to be adjacent in memory.
        self._free = list(range(count))
        self._references = [0] * count
        self._cached = [False] * count
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Return the number of pages that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.count - self.num_available

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, pages: int) -> list[int] | None:
        """Allocate that many pages; None, and no change, if there are not enough."""
        if pages > self.num_available:
            return None
        return [self._allocate_one() for _ in range(pages)]

    def _allocate_one(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            self._cached[page] = False
            if self.on_evict:
                self.on_evict(page)
        self._references[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """Add a reference to `page`, which is held or idle."""
        assert self._references[page] > 0 or page in self._idle, "a free page has no content to share"
        self._idle.pop(page, None)
        self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop a reference to each page, the last one first, so that a prefix is evicted after what follows it."""
        for page in reversed(pages):
            assert self._references[page] > 0, "a page is released once by each holder"
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._cached[page]:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, page)

    def mark_cached(self, page: int) -> None:
        """Keep `page` as idle when its last reference is dropped, until it is evicted."""
        self._cached[page] = True

    def unmark_cached(self, page: int) -> None:
        """Undo `mark_cached`; an idle page is free again."""
        self._cached[page] = False
        if page in self._idle:
            del self._idle[page]
            heapq.heappush(self._free, page)

    def check(self) -> None:
        """Assert that every page is in exactly one state."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "no page is free twice"
        for page in range(self.count):
            states = (page in free) + (page in idle) + (self._references[page] > 0)
            assert states == 1, f"page {page} is in {states} states"
