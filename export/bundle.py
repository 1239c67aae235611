"""Writing a bundle so that a kill at any moment leaves the old one or the new one, never a part.

The files are written to a folder beside the place where the bundle belongs, flushed to the disk, and the folder is
then renamed; where a bundle stands already, the two change places in one system call.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from export.errors import ExportError
from serving.core.manifest import MANIFEST_NAME, FileEntry, Manifest, sha256_of

_SUFFIX = ".partial"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def check_place(output: Path, force: bool) -> None:
    """Refuse early what `Draft.publish` would refuse after long work.

    Raises:
        ExportError: something is there and `force` is not set, or it is no bundle.
    """
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / MANIFEST_NAME).is_file()):
        raise ExportError(f"{output} exists and is no bundle; choose another place")
    if any(output.iterdir()) and not force:
        raise ExportError(f"{output} holds a bundle already; give --force to replace it")


class Draft:
    """A bundle in the making: `folder` takes its files."""

    def __init__(self, output: Path, folder: Path) -> None:
        self.output, self.folder = output, folder

    def seal(self, manifest: Manifest) -> Manifest:
        """Write the manifest with the size and hash of every file that is in the folder; returns it."""
        files = sorted(file for file in self.folder.rglob("*") if file.is_file() and file.name != MANIFEST_NAME)
        entries = {
            file.relative_to(self.folder).as_posix(): FileEntry(sha256=sha256_of(file), bytes=file.stat().st_size)
            for file in files
        }
        sealed = manifest.model_copy(update={"files": entries})
        text = sealed.model_dump_json(indent=1) + "\n"
        (self.folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
        return sealed

    def publish(self) -> None:
        """Flush everything to the disk and put the folder in its place."""
        for file in self.folder.rglob("*"):
            _flush(file)
        _flush(self.folder)
        if self.output.exists():
            _exchange(self.folder, self.output)
        else:
            self.folder.rename(self.output)
        _flush(self.output.parent)


@contextlib.contextmanager
def new_bundle(output: Path, force: bool) -> Iterator[Draft]:
    """A draft that is removed at the end, published or not; an old bundle's place is taken by `publish` alone.

    Raises:
        ExportError: something is at `output` that must not be replaced.
    """
    output = output.absolute()
    check_place(output, force)
    output.parent.mkdir(parents=True, exist_ok=True)
    _clear_remains(output)
    folder = output.parent / f".{output.name}.{os.getpid()}{_SUFFIX}"
    folder.mkdir()
    with _held(folder):
        try:
            yield Draft(output, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _clear_remains(output: Path) -> None:
    """Remove drafts of exports that were killed."""
    for folder in output.parent.glob(f".{output.name}.*{_SUFFIX}"):
        with contextlib.suppress(OSError), _held(folder):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a draft, so that others see that somebody is at work on it. OSError where somebody is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change names, in one step where the system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = os.fsencode(one), os.fsencode(other)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
    # Elsewhere there is a moment without either name; both folders are whole all the time.
    aside = one.with_name(one.name + ".old")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)
