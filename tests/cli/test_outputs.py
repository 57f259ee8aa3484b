"""Output files are checked before the work begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretell.cli.common import check_writable, write_atomic
from foretell.cli.main import main
from foretell.errors import RequestError


def test_a_writable_path_passes_and_leaves_no_trace(tmp_path: Path) -> None:
    existing, link, pipe = tmp_path / "old.json", tmp_path / "link.json", tmp_path / "pipe"
    existing.write_text("old")
    link.symlink_to(existing)
    os.mkfifo(pipe)
    for path in (tmp_path / "new.json", existing, link, pipe, Path("/dev/null")):
        check_writable(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json", "pipe"]
    assert existing.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "message"),
    [("folder", "is a folder; name a file"), ("none/x.json", "there is no folder"), ("/proc/x.json", "cannot be")],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError, match=message) as found:
        check_writable(tmp_path / name, "html")
    assert found.value.field == "html"
    assert len(str(found.value).splitlines()) == 1


def test_a_read_only_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.json"
    path.write_text("kept")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write any file
    with pytest.raises(RequestError, match="is read-only"):
        check_writable(path)


def test_a_command_refuses_before_it_loads_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The model does not exist either: whichever error comes first shows what is checked first."""
    assert main(["generate", "hi", "--model", "/no/such/model", "--out", "/proc/x.json"]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "out: /proc/x.json cannot be written" in err


@pytest.mark.parametrize("status", ["Name:\tpython\nUmask:\t0027\nState:\tR\n", "Name:\tpython\n", None])
def test_a_new_file_has_the_permissions_of_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    """Where the system tells the mask, it is not changed; elsewhere never to a more open one."""
    changes, set_mask, read_text = list[int](), os.umask, Path.read_text

    def recorded(path: Path, **options: str) -> str:
        if path != Path("/proc/self/status"):
            return read_text(path, **options)
        if status is None:
            raise FileNotFoundError(path)
        return status

    def noticed(mask: int) -> int:
        changes.append(mask)
        return set_mask(mask)

    before = os.umask(0o027)
    try:
        monkeypatch.setattr(Path, "read_text", recorded)
        monkeypatch.setattr(os, "umask", noticed)
        write_atomic(tmp_path / "new.json", "{}")
    finally:
        after = set_mask(before)
    assert (tmp_path / "new.json").stat().st_mode & 0o777 == 0o640 and after == 0o027
    assert changes == ([] if status and "Umask" in status else [0o077, 0o027])
