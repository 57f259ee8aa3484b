"""Which pages hold the beginning of which text, so that equal beginnings are computed once."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from .pages import PagePool


@dataclass(frozen=True)
class _Entry:
    """A full page and the beginning it continues."""

    serial: int  # never given twice, so what hung on an evicted page is never found again
    page: int
    key: tuple[int | str, tuple[int, ...]]


class PrefixIndex:
    """Full pages by what they hold and what precedes them; tenants never see each other's."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._entries: dict[tuple[int | str, tuple[int, ...]], _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._serial = 0
        pool.on_evict = self._evict

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: Tokens[int], tenant: str) -> list[int]:
        """Pages that hold the beginning of `tokens`, each now held once more; the last token is always left to run."""
        pages: list[int] = []
        for entry in self._walk(tokens, tenant, (len(tokens) - 1) // self.pool.page_size):
            self.pool.acquire(entry.page)
            pages.append(entry.page)
        return pages

    def _walk(self, tokens: Tokens[int], tenant: str, limit: int) -> list[_Entry]:
        size = self.pool.page_size
        found: list[_Entry] = []
        before: int | str = tenant
        for i in range(limit):
            entry = self._entries.get((before, tuple(tokens[i * size : (i + 1) * size])))
            if entry is None:
                break
            found.append(entry)
            before = entry.serial
        return found

    def insert(self, tokens: Tokens[int], pages: list[int], tenant: str, known: int = 0) -> int:
        """Offer the full `pages` of `tokens` to others; `known` of them were offered before. Says how many are now."""
        size = self.pool.page_size
        before: int | str = tenant
        if known:
            last = self._by_page.get(pages[known - 1])
            if last is None:
                return len(pages)  # private since somebody else's page held the same
            before = last.serial
        for i in range(known, len(pages)):
            key = (before, tuple(tokens[i * size : (i + 1) * size]))
            entry = self._entries.get(key)
            if entry is not None:
                break
            before = self._add(key, pages[i]).serial
        return len(pages)

    def _add(self, key: tuple[int | str, tuple[int, ...]], page: int) -> _Entry:
        self._serial += 1
        entry = self._entries[key] = self._by_page[page] = _Entry(self._serial, page, key)
        self.pool.mark_cached(page)
        return entry

    def _evict(self, page: int) -> None:
        del self._entries[self._by_page.pop(page).key]

    def clear(self) -> None:
        """Forget everything: what the pages hold is no longer true."""
        for page in list(self._by_page):
            self._evict(page)
            self.pool.unmark_cached(page)
