"""Prefix cache: an index of full pages by their tokens, so that a common prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from .pages import PagePool


@dataclass(frozen=True)
class _Entry:
    """A full page and the key of its prefix."""

    serial: int  # never reused, so pages that follow an evicted page are not found again
    page: int
    key: tuple[int | str, tuple[int, ...]]


class PrefixIndex:
    """Full pages by their tokens and the page before them. Tenants do not share pages."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._entries: dict[tuple[int | str, tuple[int, ...]], _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._serial = 0
        pool.on_evict = self._evict

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: Tokens[int], tenant: str) -> list[int]:
        """Return the cached pages of the longest prefix of `tokens`, with a reference added to each.

        The last token is never part of the prefix, because its logits are needed.
        """
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
        """Add the full `pages` of `tokens` to the index, `known` of them already added. Return how many are now."""
        size = self.pool.page_size
        before: int | str = tenant
        if known:
            last = self._by_page.get(pages[known - 1])
            if last is None:
                return len(pages)  # not indexed: another page with the same tokens is
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
        """Remove all pages, because their content is no longer valid."""
        for page in list(self._by_page):
            self._evict(page)
            self.pool.unmark_cached(page)
