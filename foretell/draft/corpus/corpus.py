"""The files that an operator named for drafting, indexed and kept up to date.

A version of the index is immutable. `refresh` builds the next one in a background thread and swaps one reference, so a
draft sees one version from beginning to end, and no step waits for a file.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from foretell.draft.idle_unload import Background
from foretell.tokenizer import Tokenizer

from .block import BlockStore
from .context_index import INDEX_BYTES, ContextIndex
from .files import MAX_FILES
from .indexed_files import CorpusStats, IndexedFiles

LOG = logging.getLogger("foretell")

POLL_SECONDS = 5.0  # between two scans for changed files,
POLL_SHARE = 100  # and this many times as long as a scan takes
BUILD_FACTOR = 5  # memory while an index is built, in sizes of the index


@dataclass(frozen=True)
class DraftCorpusConfig:
    """Files and folders by tenant; "" has those that all tenants share. The index of each has `max_bytes`."""

    roots: Mapping[str, tuple[str, ...]]
    max_bytes: int


class DraftCorpus:
    """The indexed files of all tenants: those that all share, and those of single tenants."""

    def __init__(
        self,
        config: DraftCorpusConfig,
        tokenizer: Tokenizer,
        background: Background = Background(),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Index all files; later versions are built by `refresh`, and regularly after `watch`."""
        digest = hashlib.sha256(tokenizer.as_json().encode(errors="surrogatepass")).hexdigest()
        self.max_bytes = config.max_bytes
        self._background, self._clock = background, clock
        self._lock = threading.Lock()  # one refresh at a time
        self._parts = {
            tenant: IndexedFiles(roots, tokenizer, config.max_bytes // INDEX_BYTES, BlockStore(digest, roots))
            for tenant, roots in config.roots.items()
        }
        self._warned: set[tuple[tuple[str, ...], str]] = set()
        self.refresh()

    def indices(self, tenant: str) -> tuple[ContextIndex, ...]:
        """Return the current indices for a tenant: its own files and the shared ones, never those of another."""
        key = tenant.partition(":")[0]
        own, shared = self._parts.get(key), self._parts.get("")
        return (own.indices if key and own else ()) + (shared.indices if shared else ())

    @property
    def stats(self) -> CorpusStats:
        """The size of all parts together."""
        return functools.reduce(operator.add, (part.stats for part in self._parts.values()))

    @property
    def max_growth(self) -> int:
        """Return the bytes that the indices may still grow by, including one that is being built."""
        used = sum(len(index) for part in self._parts.values() for index in part.indices) * INDEX_BYTES
        return max(0, (len(self._parts) + BUILD_FACTOR) * self.max_bytes - used)

    def refresh(self) -> bool:
        """Scan for changed files and index them; return whether there were any. A running draft keeps its version."""
        with self._lock:
            changed = [part.refresh() for part in self._parts.values()]
            for part in self._parts.values():
                self._warn(part)
        return any(changed)

    def _warn(self, part: IndexedFiles) -> None:
        """Warn of files that are left out, once for the same reason."""
        names, stats = ", ".join(part.roots), part.stats
        reasons = {
            f"leaves out files that were not written lately: its index has reached {self.max_bytes / 2**30:.3g} GiB; "
            "raise --draft-corpus-memory or name a smaller folder": stats.over_limit,
            f"has a folder of more than {MAX_FILES} files; name a smaller one": stats.crowded,
            "leaves out files that cannot be read; check their access": stats.unread,
            "has no text file to draft from": not stats.files,
        }
        for reason, applies in reasons.items():
            if applies and (part.roots, reason) not in self._warned:
                self._warned.add((part.roots, reason))
                LOG.warning("draft corpus %s %s", names, reason)

    def watch(self) -> None:
        """Refresh regularly in the background, for as long as this object is in use."""
        self._later(POLL_SECONDS)

    def _later(self, seconds: float) -> None:
        """Start a timer that holds no reference: it must not keep an unused engine alive."""
        reference = weakref.ref(self)

        def poll() -> None:
            corpus = reference()
            if corpus is not None:
                corpus._poll()

        self._background.later(seconds, poll)

    def _poll(self) -> None:
        began = self._clock()
        try:
            if self.refresh():
                LOG.info("draft corpus has changed: %s", self.stats)
        except Exception as error:  # the next scan may work
            if ((), repr(error)) not in self._warned:
                self._warned.add(((), repr(error)))
                LOG.warning("the draft corpus cannot be refreshed and stays as it is", exc_info=error)
        self._later(max(POLL_SECONDS, POLL_SHARE * (self._clock() - began)))
