"""The files of a draft corpus: which are found, and that nothing outside the folder is read."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from foretell.draft.corpus import files
from foretell.draft.corpus.files import MAX_DEPTH, MAX_FILE_BYTES, find_files, read_file
from foretell.draft.corpus.gitignore import IgnoreRules, parse_rules
from tests.draft.corpora import write


def found(root: Path) -> set[str]:
    return {os.path.relpath(state.path, root) for state in find_files(root)}


def test_text_files_of_a_folder_are_found(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.txt", "b/d/e", "no suffix"):
        write(tmp_path / name, "text")
    assert found(tmp_path) == {"a.py", "b/c.txt", "b/d/e", "no suffix"}
    (alone,) = find_files(tmp_path / "b/c.txt")
    assert alone.path == str(tmp_path / "b/c.txt") and alone.size == 4
    hidden = write(tmp_path / ".env", "key")
    assert len(find_files(hidden)) == 1, "a file that is named itself"


def test_hidden_large_and_special_files_are_left_out(tmp_path: Path) -> None:
    for name in (".git/config", ".env", "a/.venv/b.py", "bad\udcff", "bad\n"):
        write(tmp_path / name, "text")
    write(tmp_path / "large", b"a" * (MAX_FILE_BYTES + 1))
    write(tmp_path / "just", b"a" * MAX_FILE_BYTES)
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "/".join("d" * (MAX_DEPTH + 2)) / "deep", "text")
    assert found(tmp_path) == {"just"}


def test_no_link_is_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside/secret", "text").parent
    inside = write(tmp_path / "inside/a", "text").parent
    (inside / "file").symlink_to(outside / "secret")
    (inside / "folder").symlink_to(outside)
    (inside / "up").symlink_to("..")
    assert found(inside) == {"a"}
    (tmp_path / "link").symlink_to(inside)
    with pytest.raises(OSError):
        find_files(tmp_path / "link")


def test_a_file_that_became_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    secret = write(tmp_path / "outside/secret", "text")
    root = write(tmp_path / "root/b/secret", "own").parents[1]
    path = str(root / "b/secret")
    assert read_file(root, path).text == "own"
    shutil.rmtree(root / "b")
    (root / "b").symlink_to(secret.parent)
    with pytest.raises(OSError):
        read_file(root, path)
    (root / "b").unlink()
    (root / "b").mkdir()
    (root / "b/secret").symlink_to(secret)
    with pytest.raises(OSError):
        read_file(root, path)
    (root / "b/secret").unlink()
    os.mkfifo(root / "b/secret")
    with pytest.raises(OSError):
        read_file(root, path)


@pytest.mark.parametrize("data", [b"a\0b", b"\xff\xfe", b"a" * (MAX_FILE_BYTES + 1), "ä".encode("latin-1")])
def test_a_file_that_is_no_text_has_none(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path / "file", data)
    assert read_file(tmp_path, str(path)).text is None
    assert read_file(path, str(path)).text is None


def test_the_mark_at_the_start_of_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    assert read_file(tmp_path, str(write(tmp_path / "file", b"\xef\xbb\xbfa"))).text == "a"


def test_a_folder_that_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        find_files(tmp_path / "missing")
    monkeypatch.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(PermissionError):
        find_files(tmp_path)


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 5)
    for number in range(9):
        write(tmp_path / str(number), "text")
    assert len(find_files(tmp_path)) == 6, "one more, so that it shows"


IGNORED = {
    ".gitignore": "*.log\n!keep.log\n/build\nnode_modules/\ndocs/*.txt\n**/tmp/x\na/**/z\n\\#hash\n\\!bang\n# no rule\n"
    "trail\\ \nwide   \nq?s\n[abc]1\n[!abc]2\nlogs/**\n**/deep\nfoo/bar/\nname*with*stars\n\nold\r\n",
    "sub/.gitignore": "!b.log\n*.tmp\n/only\n",
}
CANDIDATES = """
x.log keep.log sub/b.log sub/c.log build/a sub/build/a node_modules/a sub/node_modules/b node_modules2
docs/a.txt docs/b/a.txt tmp/x sub/tmp/x tmp/y a/z a/b/z a/b/c/z #hash !bang wide qxs q/s a1 d1 a2 d2 logs/x
logs/y/z deep s/deep foo/bar/x foo/bars x/foo/bar/y nameAwithBstars namewithstarsX sub/c.tmp c.tmp sub/only
sub/x/only src/a.py old
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the reference")
def test_a_gitignore_leaves_out_what_git_leaves_out(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True, timeout=60)
    for name, rules in IGNORED.items():
        write(tmp_path / name, rules)
    for name in (*CANDIDATES.split(), "trail "):
        write(tmp_path / name, "text")
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=tmp_path, check=True, capture_output=True, timeout=60
    ).stdout
    kept = {name for name in listed.decode().split("\0") if name and not name.endswith(".gitignore")}
    assert found(tmp_path) == kept
    assert 10 < len(kept) < len(CANDIDATES.split())


def test_a_pattern_with_many_stars_ends() -> None:
    rules = IgnoreRules().within(0, parse_rules("*a" * 60 + "b\n" + "**/" * 60 + "b\n" + "[" * 50 + "\n"))
    assert not rules.ignores(("a" * 250,) * 60, False)


def test_a_gitignore_that_is_a_link_counts_for_nothing(tmp_path: Path) -> None:
    write(tmp_path / "rules", "a\n")
    write(tmp_path / "root/a", "text")
    (tmp_path / "root/.gitignore").symlink_to(tmp_path / "rules")
    assert found(tmp_path / "root") == {"a"}
