"""The text files below some folders, indexed: which ones, and what is indexed again when they change."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from foretell.draft.ngram import SEPARATOR
from foretell.errors import RequestError
from foretell.tokenizer import Tokenizer

from .block import BlockStore, IndexBlock
from .context_index import ContextIndex, Int32
from .files import MAX_FILES, FileState, find_files, read_file

REBUILD_SHARE = 8  # the main index is built again when 1 token in 8 has changed,
REBUILD_TOKENS = 65_536  # and not for fewer than these
FULL_SHARE = 1 / 16  # of the limit; no further file is read when less is left
NO_FILES = IndexBlock.build((), ())


@dataclass(frozen=True)
class _Seen:
    """A file as it was last read."""

    state: FileState
    digest: str
    num_tokens: int  # 0: not text
    tokens: Int32 | None = None  # until they are in a block

    @property
    def row(self) -> tuple[str, int, int, str]:
        return self.state.path, self.state.size, self.state.mtime_ns, self.digest


class _Found(NamedTuple):
    """The files below all roots."""

    files: dict[str, tuple[Path, FileState]]  # by path, with the root
    unread: int  # roots that cannot be read
    crowded: int  # roots with more than MAX_FILES files


@dataclass(frozen=True)
class CorpusStats:
    """The size of a corpus, and what it leaves out."""

    files: int = 0
    tokens: int = 0
    unread: int = 0  # files that cannot be read
    over_limit: int = 0  # files beyond the memory limit
    crowded: int = 0  # folders with more than MAX_FILES files

    def __add__(self, other: CorpusStats) -> CorpusStats:
        return CorpusStats(*map(operator.add, astuple(self), astuple(other)))

    def __str__(self) -> str:
        left_out = self.unread + self.over_limit
        return f"{self.files} files, {self.tokens} tokens" + (f", {left_out} files left out" if left_out else "")


class IndexedFiles:
    """The files below some roots: a main index, a small one of what changed since, and its copy in the cache folder."""

    def __init__(self, roots: tuple[str, ...], tokenizer: Tokenizer, max_tokens: int, store: BlockStore) -> None:
        self.roots, self.max_tokens = roots, max_tokens
        self.indices: tuple[ContextIndex, ...] = ()  # newest first; swapped as one
        self.stats = CorpusStats()
        self._tokenizer, self._store = tokenizer, store
        self._main = store.load() or NO_FILES
        self._changes = NO_FILES
        self._gone: frozenset[str] = frozenset()  # files of the main index that are no longer valid
        self._seen = {
            file.path: _Seen(FileState(file.path, file.size, file.mtime_ns), file.digest, file.length)
            for file in self._main.files
        }
        self._found: _Found | None = None
        self._publish()

    def refresh(self) -> bool:
        """Index what has changed since the last time; return whether anything has."""
        found = self._find()
        if found == self._found and not self.stats.unread:
            return False
        wanted = self._choose(found)
        main, changes = self._main, self._changes
        kept = {path for path, seen in wanted.items() if main.digests.get(path) == seen.digest}
        new = [seen for path, seen in wanted.items() if path not in kept]
        gone = frozenset(main.digests) - kept
        num_changed = sum(seen.num_tokens for seen in new) + sum(main.by_path[path].length for path in gone)
        if num_changed > max(REBUILD_TOKENS, len(main) // REBUILD_SHARE) or (new and not kept):
            main, changes, gone = self._build(list(wanted.values())), NO_FILES, frozenset()
        elif changes.digests != {seen.state.path: seen.digest for seen in new}:
            changes = self._build(new)
        self._found = found
        self._seen = {path: replace(seen, tokens=None) for path, seen in self._seen.items()}
        if (main, changes, gone) == (self._main, self._changes, self._gone):
            return False
        is_rebuilt = main is not self._main
        self._main, self._changes, self._gone = main, changes, gone
        self._publish()
        if is_rebuilt:
            self._store.save(main)
        return True

    def _publish(self) -> None:
        indices = (self._changes.index(), self._main.index(self._gone))
        self.indices = tuple(index for index in indices if len(index))

    def _choose(self, found: _Found) -> dict[str, _Seen]:
        """Return the files to index, by path: those written last, up to the limit."""
        self._seen = {path: seen for path, seen in self._seen.items() if path in found.files}
        wanted: dict[str, _Seen] = {}
        num_tokens, unread, over_limit, room = 0, found.unread, 0, self.max_tokens
        for path, (root, state) in sorted(found.files.items(), key=lambda each: (-each[1][1].mtime_ns, each[0])):
            if room < self.max_tokens * FULL_SHARE:
                over_limit += 1
                continue
            try:
                seen = self._read_if_changed(root, state, room)
            except FileNotFoundError:
                continue
            except OSError:
                unread += 1
                continue
            if seen.num_tokens >= room:
                over_limit += 1
            elif seen.num_tokens:
                wanted[path] = seen
                room -= seen.num_tokens + 1
                num_tokens += seen.num_tokens
        self.stats = CorpusStats(len(wanted), num_tokens, unread, over_limit, found.crowded)
        return dict(sorted(wanted.items()))

    def _find(self) -> _Found:
        found: dict[str, tuple[Path, FileState]] = {}
        unread = crowded = 0
        for root in map(Path, self.roots):
            try:
                files = find_files(root)
            except OSError:
                unread += 1
                continue
            crowded += len(files) > MAX_FILES
            found = {state.path: (root, state) for state in files[:MAX_FILES]} | found
        return _Found(found, unread, crowded)

    def _read_if_changed(self, root: Path, state: FileState, room: int) -> _Seen:
        """Return a file as it is now. It is read if its size or time changed, or if its tokens fit and are nowhere."""
        seen = self._seen.get(state.path)
        if seen is not None and seen.state == state and (not 0 < seen.num_tokens < room or self._has_tokens(seen)):
            return seen
        content = read_file(root, state.path)
        if seen is not None and seen.digest == content.digest and self._has_tokens(seen):
            seen = replace(seen, state=state)
        else:
            tokens = self._encode(content.text or "")
            seen = _Seen(state, content.digest, len(tokens), tokens)
        self._seen[state.path] = seen
        return seen

    def _encode(self, text: str) -> Int32:
        """Return the tokens of a text and, after a separator, those of the text as a JSON string.

        Agents write files in the arguments of tool calls, where line ends and quotes are escaped.
        """
        try:
            tokens = self._tokenizer.encode(text, add_special=False) if text else []
            escaped = json.dumps(text, ensure_ascii=False)[1:-1]
            if escaped != text:
                tokens = [*tokens, SEPARATOR, *self._tokenizer.encode(escaped, add_special=False)]
        except RequestError:  # the tokenizer cannot encode it
            tokens = []
        return np.array(tokens, dtype=np.int32)

    def _has_tokens(self, seen: _Seen) -> bool:
        return self._find_tokens(seen) is not None

    def _find_tokens(self, seen: _Seen) -> Int32 | None:
        if seen.tokens is not None:
            return seen.tokens
        for block in (self._changes, self._main):
            if block.digests.get(seen.state.path) == seen.digest:
                return block.tokens(seen.state.path)
        return None

    def _build(self, files: Sequence[_Seen]) -> IndexBlock:
        documents = [tokens for seen in files if (tokens := self._find_tokens(seen)) is not None]
        assert len(documents) == len(files), "every chosen file was read"
        return IndexBlock.build([seen.row for seen in files], documents)
