"""Corpora: files on disk to a stream of sentence pairs.

Every reader is a generator, so a corpus is never held in memory. A line ends at "\\n" (or "\\r\\n") and nowhere else:
the other characters that `str.splitlines` splits at (form feed, U+0085, U+2028, ...) occur inside sentences, and
splitting there puts the two sides of a corpus out of step. Files whose name ends in ".gz" are decompressed on the fly.
"""

from __future__ import annotations

import gzip
import re
import zipfile
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import IO, NamedTuple, cast

from serving.core.errors import InvalidInput, NotFound

PLAIN_OR_GZ = ("", ".gz")
DAMAGED = (gzip.BadGzipFile, zipfile.BadZipFile, EOFError, zlib.error)


class Pair(NamedTuple):
    """A sentence and its translation, as the corpus has them."""

    source: str
    target: str


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, plain or .gz, without their line ends. A byte-order mark is skipped.

    Raises:
        NotFound: there is no such file.
        InvalidInput: a line is not UTF-8, or the .gz file is damaged.
    """
    try:
        with _open_binary(path) as file:
            yield from _decoded(file, path.name)
    except FileNotFoundError as error:
        raise NotFound(f"no file {path}") from error
    except DAMAGED as error:
        raise InvalidInput(f"{path} is damaged or not a gzip file ({error}); fetch it again") from error


def read_parallel(source: Path, target: Path) -> Iterator[Pair]:
    """Line n of one file with line n of the other.

    Raises:
        InvalidInput: the files have not the same number of lines, so they are not line by line translations.
    """
    for number, (left, right) in enumerate(zip_longest(read_lines(source), read_lines(target)), start=1):
        if left is None or right is None:
            shorter, longer = (source, target) if left is None else (target, source)
            raise InvalidInput(f"{shorter} ends after line {number - 1} but {longer} goes on; they are not parallel")
        yield Pair(left, right)


def read_tsv(path: Path, source_column: int = 0, target_column: int = 1) -> Iterator[Pair]:
    """TAB-separated columns, counted from 0; further columns are ignored, and quotes mean nothing.

    Raises:
        InvalidInput: a line has too few columns.
    """
    yield from _columns(read_lines(path), path.name, source_column, target_column)


def read_manythings(path: Path, *, english_first: bool = True) -> Iterator[Pair]:
    """A sentence-pair zip of manythings.org/anki: one member `<language>.txt`, TAB: English, other[, attribution].

    With `english_first=False` English is the target.

    Raises:
        NotFound: there is no such file.
        InvalidInput: it is not a zip, is damaged, or does not hold exactly one list of sentence pairs.
    """
    source_column, target_column = (0, 1) if english_first else (1, 0)
    try:
        with zipfile.ZipFile(path) as archive:
            name = _pair_list(archive, path)
            with archive.open(name) as file:
                yield from _columns(_decoded(file, f"{path.name}:{name}"), name, source_column, target_column)
    except FileNotFoundError as error:
        raise NotFound(f"no file {path}") from error
    except DAMAGED as error:
        raise InvalidInput(f"{path} is damaged or not a zip file ({error}); fetch it again") from error


def count_lines(path: Path) -> int:
    """How many lines a text file, plain or .gz, or the list in a sentence-pair zip has; fast, nothing is decoded."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive, archive.open(_pair_list(archive, path)) as file:
                return sum(1 for _ in file)
        with _open_binary(path) as file:
            return sum(1 for _ in file)
    except FileNotFoundError as error:
        raise NotFound(f"no file {path}") from error
    except DAMAGED as error:
        raise InvalidInput(f"{path} is damaged ({error}); fetch it again") from error


def find_text(folder: Path, stem: str, language: str) -> Path:
    """The file `<stem>.<language>` or `<stem>.<language>.gz` in `folder`.

    Raises:
        NotFound: neither is there.
    """
    for ending in PLAIN_OR_GZ:
        path = folder / f"{stem}.{language}{ending}"
        if path.is_file():
            return path
    raise NotFound(f"no {stem}.{language} or {stem}.{language}.gz in {folder}")


def text_stems(folder: Path, language: str) -> set[str]:
    """Every NAME for which `folder` holds NAME.<language> or NAME.<language>.gz.

    Raises:
        NotFound: there is no such folder.
    """
    if not folder.is_dir():
        raise NotFound(f"no file or folder {folder}")
    ending = re.compile(rf"(.+)\.{re.escape(language)}(\.gz)?$")
    return {match.group(1) for path in folder.iterdir() if path.is_file() and (match := ending.match(path.name))}


def _pair_list(archive: zipfile.ZipFile, path: Path) -> str:
    names = [name for name in archive.namelist() if name.endswith(".txt") and not Path(name).name.startswith("_")]
    if len(names) != 1:
        raise InvalidInput(f"{path} holds {len(names)} lists of sentence pairs, not one; it is not of manythings.org")
    return names[0]


def _open_binary(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _decoded(file: IO[bytes], name: str) -> Iterator[str]:
    # Binary lines end at "\n" only; decoding each alone lets an error name its line.
    for number, raw in enumerate(file, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{name} line {number} is not UTF-8 (byte {error.start}); convert the file") from error
        yield line.removesuffix("\n").removesuffix("\r")


def _columns(lines: Iterator[str], name: str, source: int, target: int) -> Iterator[Pair]:
    needed = max(source, target) + 1
    for number, line in enumerate(lines, start=1):
        columns = line.split("\t")
        if len(columns) < needed:
            if not line.strip():
                continue
            raise InvalidInput(f"{name} line {number} has {len(columns)} TAB-separated columns; {needed} are needed")
        yield Pair(columns[source], columns[target])
