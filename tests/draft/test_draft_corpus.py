"""A draft corpus: what is drafted from files, what a change encodes, its copy on disk, its limits, its tenants."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from foretell.draft.corpus import block, indexed_files
from foretell.draft.corpus.block import corpus_folder
from foretell.draft.corpus.corpus import POLL_SECONDS, POLL_SHARE, DraftCorpus, DraftCorpusConfig
from foretell.draft.corpus.files import MAX_FILES
from foretell.draft.idle_unload import Background
from foretell.errors import RequestError
from foretell.server.service import key_tenant, tenant
from foretell.utils import private_files
from tests.draft.corpora import CharTokenizer, draft_text, open_files, write

ONE = "the first file has these words."
TWO = "another one says something else!"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_HOME", str(tmp_path / "home"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "root/one", ONE, 1000)
    write(tmp_path / "root/sub/two", TWO, 2000)
    return tmp_path / "root"


def test_files_are_drafted(root: Path) -> None:
    corpus = open_files(root)
    assert draft_text(corpus, "Is it the firs") == "t file h"
    assert draft_text(corpus, "one says some") == "thing el"
    assert (corpus.stats.files, corpus.stats.over_limit, corpus.stats.unread) == (2, 0, 0)
    assert corpus.stats.tokens == len(ONE) + len(TWO)


def test_a_file_is_drafted_inside_a_string_of_json_too(root: Path) -> None:
    write(root / "three", 'import x\nif name == "x":\n    call()\n')
    corpus = open_files(root)
    assert draft_text(corpus, "x\nif name == ") == '"x":\n   '
    assert draft_text(corpus, '{"content": "import x\\nif name == ') == '\\"x\\":\\n'


def test_changes_are_indexed_and_nothing_else(root: Path) -> None:
    tokenizer = CharTokenizer()
    corpus = open_files(root, tokenizer=tokenizer)
    assert tokenizer.encoded == [TWO, ONE]
    assert not corpus.refresh()
    write(root / "one", "the first file is a new one now.", 3000)
    write(root / "new", "quite a new file, this")
    assert corpus.refresh()
    assert sorted(tokenizer.encoded[2:]) == ["quite a new file, this", "the first file is a new one now."]
    assert draft_text(corpus, "the first file ") == "is a new"
    assert draft_text(corpus, "quite a n") == "ew file,"
    assert draft_text(corpus, "has these w") == "", "the old text"
    (root / "sub/two").unlink()
    assert corpus.refresh()
    assert draft_text(corpus, "one says some") == ""
    assert len(tokenizer.encoded) == 4 and corpus.stats.files == 2
    write(root / "one", ONE, 4000)
    assert corpus.refresh(), "as it was"
    assert draft_text(corpus, "has these w") == "ords."
    assert not draft_text(corpus, "a new one n").startswith("ow")


def test_a_file_that_was_only_touched_changes_nothing(root: Path) -> None:
    tokenizer = CharTokenizer()
    corpus = open_files(root, tokenizer=tokenizer)
    os.utime(root / "one", (5000, 5000))
    assert not corpus.refresh()
    assert len(tokenizer.encoded) == 2


def test_the_main_index_is_rebuilt_when_much_has_changed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_files, "REBUILD_TOKENS", 200)
    tokenizer = CharTokenizer()
    corpus = open_files(root, tokenizer=tokenizer)
    (part,) = corpus._parts.values()
    stored, main = part._store.path.read_bytes(), part._main
    for number in range(30):
        write(root / f"new {number}", f"file number {number} of thirty")
        assert corpus.refresh()
        assert draft_text(corpus, f"file number {number} o") == "f thirty"
        assert draft_text(corpus, "one says some") == "thing el"
        assert sum(map(len, part.indices)) < len(part._main) + 260, "the changes are few"
    assert part._main is not main and part._store.path.read_bytes() != stored
    assert len(tokenizer.encoded) == 32, "no text is encoded twice"
    assert corpus.stats.files == 32


def test_the_next_start_reads_the_index_from_the_cache_folder(root: Path) -> None:
    open_files(root)
    assert corpus_folder().stat().st_mode & 0o77 == 0, "others cannot read it"
    write(root / "one", "the first file is a new one now.", 3000)
    (root / "sub/two").unlink()
    tokenizer = CharTokenizer()
    corpus = open_files(root, tokenizer=tokenizer)
    assert tokenizer.encoded == ["the first file is a new one now."]
    assert draft_text(corpus, "the first file ") == "is a new"
    assert draft_text(corpus, "one says some") == draft_text(corpus, "has these w") == ""


def test_another_tokenizer_or_folder_has_another_index(root: Path) -> None:
    open_files(root)
    for where, name in ((root, "other"), (root / "sub", "chars")):
        tokenizer = CharTokenizer(name)
        open_files(where, tokenizer=tokenizer)
        assert TWO in tokenizer.encoded


def spoil(position: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return change


def unsort(path: Path) -> None:
    """Store arrays with right checksums that do not belong together."""
    block.write_mapped(path, block.read_about(path), {**READ(path), "order": READ(path)["order"] + 7})


def READ(path: Path) -> dict:  # type: ignore[type-arg]
    return block.read_mapped(path, block.read_about(path))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "first byte": spoil(0),
    "header": spoil(40),
    "last byte": spoil(-100),
    "positions outside": unsort,
    "no files": lambda path: block.write_mapped(path, block.read_about(path), {"order": READ(path)["order"]}),
    "writable by the group": lambda path: path.chmod(0o664),
    "a link": lambda path: path.rename(path.with_name("other")).exists() and path.symlink_to("other"),
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_built_again(root: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    open_files(root)
    (path,) = corpus_folder().glob("*.index")
    DAMAGES[damage](path)
    tokenizer = CharTokenizer()
    corpus = open_files(root, tokenizer=tokenizer)
    assert tokenizer.encoded == [TWO, ONE]
    assert draft_text(corpus, "one says some") == "thing el"
    assert "indexed again" in caplog.text and str(path) in caplog.text
    if damage != "a folder":
        open_files(root, tokenizer=tokenizer)
        assert len(tokenizer.encoded) == 2, "and stored again"


def test_a_cache_folder_of_another_user_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_files(root)
    monkeypatch.setattr(private_files, "is_trusted_owner", lambda found: False)
    tokenizer = CharTokenizer()
    corpus = open_files(root, tokenizer=tokenizer)
    assert tokenizer.encoded == [TWO, ONE] and draft_text(corpus, "one says some") == "thing el"
    assert "cannot be used" in caplog.text and "cannot be written" in caplog.text


def test_the_index_of_a_folder_that_is_gone_is_removed(root: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other/file", "text").parent
    open_files(other)
    (other / "file").unlink()
    other.rmdir()
    open_files(root)
    assert len(list(corpus_folder().glob("*.index"))) == 1


def test_the_files_written_last_are_kept_within_the_memory(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def words(number: int) -> str:
        return chr(5000 + number) + chr(6000 + number)  # of no other file

    for number in range(40):
        write(root / f"{number:02}", f"{words(number)} one of forty files", 10_000 + number)
    tokenizer = CharTokenizer()
    corpus = open_files(root, tokenizer=tokenizer, tokens=300)
    kept = [bool(draft_text(corpus, words(number))) for number in range(40)]
    assert kept == sorted(kept) and 10 <= sum(kept) <= 300 / 23
    assert sum(len(index) for index in corpus.indices("")) <= 300
    assert corpus.stats.over_limit == 42 - sum(kept)
    assert "raise --draft-corpus-memory" in caplog.text
    assert len(tokenizer.encoded) <= sum(kept) + 2, "what does not fit is not encoded"
    before = len(tokenizer.encoded)
    os.utime(root / "00", (20_000, 20_000))
    assert corpus.refresh() and draft_text(corpus, words(0), 4) == " one"[:3]
    assert draft_text(corpus, words(40 - sum(kept))) == "", "the oldest made room"
    assert len(tokenizer.encoded) <= before + 2
    assert caplog.text.count("raise --draft-corpus-memory") == 1, "it is said once"


def test_a_file_larger_than_the_memory_leaves_room_for_the_others(root: Path) -> None:
    write(root / "large", "z" * 1000, 9000)
    tokenizer = CharTokenizer()
    corpus = open_files(root, tokenizer=tokenizer, tokens=300)
    assert draft_text(corpus, "one says some") == "thing el" and corpus.stats.over_limit == 1
    write(root / "one", ONE + "!", 9001)
    corpus.refresh()
    assert tokenizer.encoded.count("z" * 1000) == 1


def test_what_is_no_text_is_left_out_and_read_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root / "binary", b"one\0two")
    write(root / "latin", "ä".encode("latin-1"))
    write(root / "empty", "")
    reads: list[str] = []
    read = indexed_files.read_file
    monkeypatch.setattr(indexed_files, "read_file", lambda top, path: reads.append(path) or read(top, path))
    corpus = open_files(root)
    assert (corpus.stats.files, len(reads)) == (2, 5)
    write(root / "one", ONE + "!", 3000)
    corpus.refresh()
    assert len(reads) == 6


def test_a_file_that_cannot_be_read_is_left_out_until_it_can(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = indexed_files.read_file

    def refusing(top: Path, path: str) -> object:
        if path.endswith("two"):
            raise PermissionError(13, "Permission denied", path)
        return read(top, path)

    monkeypatch.setattr(indexed_files, "read_file", refusing)
    corpus = open_files(root)
    assert (corpus.stats.files, corpus.stats.unread) == (1, 1)
    assert "cannot be read" in caplog.text and draft_text(corpus, "one says some") == ""
    monkeypatch.setattr(indexed_files, "read_file", read)
    assert corpus.refresh(), "its time of modification is the same"
    assert draft_text(corpus, "one says some") == "thing el" and corpus.stats.unread == 0


def test_a_text_that_the_tokenizer_refuses_is_left_out(root: Path) -> None:
    class Refusing(CharTokenizer):
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            if text == TWO:
                raise RequestError("prompt", "the model's tokenizer cannot encode this")
            return super().encode(text)

    assert open_files(root, tokenizer=Refusing()).stats.files == 1


def test_a_folder_that_disappears_drafts_nothing(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = write(tmp_path / "other/file", "text of the other folder").parent
    corpus = open_files(root, other)
    assert draft_text(corpus, "text of t") == "he other"
    root.rename(tmp_path / "moved")
    assert corpus.refresh()
    assert draft_text(corpus, "one says some") == "" and draft_text(corpus, "text of t") == "he other"
    assert "cannot be read" in caplog.text
    (tmp_path / "moved").rename(root)
    assert corpus.refresh() and draft_text(corpus, "one says some") == "thing el"


def test_too_many_files_and_none_are_reported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(indexed_files, "MAX_FILES", 1)
    assert open_files(root).stats.files == 1
    assert f"more than {MAX_FILES} files" in caplog.text
    (tmp_path / "nothing").mkdir()
    open_files(tmp_path / "nothing")
    assert "has no text file" in caplog.text


def test_a_tenant_drafts_from_its_own_files_and_from_shared_ones(root: Path, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine/file", "only Anna knows this text").parent
    anna, berta = key_tenant("anna"), key_tenant("berta")
    hers = write(tmp_path / "hers/file", "and this is Berta's own").parent
    corpus = open_files(root, **{anna: mine, berta: hers})
    for salt in (None, "salt"):
        assert draft_text(corpus, "only Anna k", tenant=tenant("anna", salt)) == "nows thi"
        assert draft_text(corpus, "and this is B", tenant=tenant("berta", salt)) == "erta's o"
        for other in ("berta", "", "carla"):
            assert draft_text(corpus, "only Anna k", tenant=tenant(other, salt)) == ""
            assert draft_text(corpus, "one says some", tenant=tenant(other, salt)) == "thing el", "shared"
    assert corpus.indices(tenant("", anna)) == corpus.indices(""), "a salt is no key"


def test_without_shared_files_other_tenants_draft_nothing(root: Path) -> None:
    anna = key_tenant("anna")
    corpus = open_files(**{anna: root})
    assert draft_text(corpus, "one says some", tenant=anna) == "thing el"
    assert draft_text(corpus, "one says some") == draft_text(corpus, "one says some", tenant="berta") == ""
    assert (corpus.stats.files, corpus.max_growth > 0) == (2, True)


class Waiting(Background):
    """Keeps timers for the test."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        self.timers.append((seconds, work))


class Watched:
    """A corpus that is watched, with a manual clock; a scan takes `seconds`."""

    def __init__(self, root: Path) -> None:
        self.now, self.seconds, self.background = 0.0, 0.0, Waiting()
        config = DraftCorpusConfig({"": (str(root),)}, 1 << 20)
        self.corpus = DraftCorpus(config, CharTokenizer(), self.background, self.tick)  # type: ignore[arg-type]
        self.corpus.watch()

    def tick(self) -> float:
        self.now += self.seconds
        return self.now

    def expire(self) -> float:
        """Let the timer expire; return after how many seconds."""
        seconds, work = self.background.timers.pop()
        work()
        return seconds


def test_changes_are_found_at_intervals(root: Path) -> None:
    watched = Watched(root)
    write(root / "new", "quite a new file, this")
    assert draft_text(watched.corpus, "quite a n") == ""
    assert watched.expire() == POLL_SECONDS
    assert draft_text(watched.corpus, "quite a n") == "ew file,"
    watched.seconds = 3.0
    watched.expire()
    assert watched.expire() == 3.0 * POLL_SHARE, "a scan that takes long is rare"


def test_a_failed_scan_leaves_the_index_as_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(root)
    with monkeypatch.context() as patch:
        patch.setattr(indexed_files.IndexBlock, "build", lambda *_: (_ for _ in ()).throw(MemoryError("planted")))
        write(root / "new", "quite a new file, this")
        for _ in range(3):
            watched.expire()
    assert caplog.text.count("stays as it is") == 1
    assert draft_text(watched.corpus, "one says some") == "thing el"
    watched.expire()
    assert draft_text(watched.corpus, "quite a n") == "ew file,"


def test_a_corpus_that_is_not_used_any_more_is_freed(root: Path) -> None:
    watched = Watched(root)
    reference = weakref.ref(watched.corpus)
    del watched.corpus
    gc.collect()
    assert reference() is None
    watched.expire()
    assert not watched.background.timers


def test_a_draft_keeps_the_version_it_began_with(root: Path) -> None:
    corpus = open_files(root)
    before = corpus.indices("")
    write(root / "one", "the first file is a new one now.", 3000)
    corpus.refresh()
    text = [ord(letter) for letter in "the first file "]
    ((length, position), *_) = before[0].matches(text, len(text))
    assert length == len(text) and chr(before[0].tokens[position]) == "h", "the old text is still whole"
    assert corpus.indices("") is not before


def test_no_line_of_the_log_has_the_text_of_a_file(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    watched = Watched(root)
    write(root / "new", "quite a new file, this")
    watched.expire()
    assert "3 files" in caplog.text and "quite" not in caplog.text
