"""Readers: what is a line, what is a pair, and what is said about files that are neither."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.errors import InvalidInput, NotFound
from tests.support.archives import zipped
from training.corpus import (
    Pair,
    count_lines,
    find_text,
    read_lines,
    read_manythings,
    read_parallel,
    read_tsv,
    text_stems,
)

# Every character but the line end, and "\r" only where it cannot be part of one.
SENTENCES = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=20))


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["text.en", "text.en.gz"])
@given(lines=SENTENCES)
def test_a_line_ends_at_the_line_end_and_nowhere_else(
    lines: list[str], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.mktemp("lines") / name, "".join(f"{line}\n" for line in lines).encode())
    expected = [lines[0].removeprefix("\ufeff"), *lines[1:]] if lines else []
    assert list(read_lines(path)) == expected
    assert count_lines(path) == len(lines)


def test_windows_line_ends_byte_order_mark_and_missing_last_line_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.en", b"\xef\xbb\xbfHello.\r\nWhat\xe2\x80\xa8now?\r\nBye.")
    assert list(read_lines(path)) == ["Hello.", "What\u2028now?", "Bye."]
    assert count_lines(path) == 3


def test_reading_streams(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", b"Hello.\tHallo.\n" + b"no translation\n")
    pairs = read_tsv(path)
    assert next(pairs) == Pair("Hello.", "Hallo.")
    with pytest.raises(InvalidInput, match=r"a\.tsv line 2 has 1 TAB-separated columns; 2 are needed"):
        next(pairs)


def test_tsv_ignores_further_columns_blank_lines_and_quotes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv.gz", '"Hi!"\t„Hallo!“\tCC-BY\n\nGo.\tGeh.\n'.encode())
    assert list(read_tsv(path)) == [('"Hi!"', "„Hallo!“"), ("Go.", "Geh.")]
    assert list(read_tsv(path, source_column=1, target_column=0))[1] == ("Geh.", "Go.")


def test_parallel_files_mix_plain_and_gz(tmp_path: Path) -> None:
    source = written(tmp_path / "train.en", b"One.\nTwo.\n")
    written(tmp_path / "train.de.gz", b"Eins.\nZwei.\n")
    assert list(read_parallel(source, find_text(tmp_path, "train", "de"))) == [("One.", "Eins."), ("Two.", "Zwei.")]
    assert text_stems(tmp_path, "de") == text_stems(tmp_path, "en") == {"train"}


@pytest.mark.parametrize(("source", "target"), [(b"1\n2\n3\n", b"1\n2\n"), (b"1\n2\n", b"1\n2\n3\n")])
def test_files_out_of_step_are_refused(tmp_path: Path, source: bytes, target: bytes) -> None:
    paths = written(tmp_path / "a.en", source), written(tmp_path / "a.de", target)
    with pytest.raises(InvalidInput, match=r"ends after line 2 but .* goes on; they are not parallel"):
        list(read_parallel(*paths))


def test_manythings_zip_both_ways(tmp_path: Path) -> None:
    table = b"Hi.\tHallo!\tCC-BY 2.0 (France) Attribution: tatoeba.org\nRun!\tLauf!\n"
    path = zipped(tmp_path / "deu-eng.zip", {"deu.txt": table, "_about.txt": b"About.\n"})
    assert list(read_manythings(path)) == [("Hi.", "Hallo!"), ("Run!", "Lauf!")]
    assert list(read_manythings(path, english_first=False)) == [("Hallo!", "Hi."), ("Lauf!", "Run!")]
    assert count_lines(path) == 2


def test_a_zip_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "other.zip", {"a.txt": b"", "b.txt": b""})
    with pytest.raises(InvalidInput, match="holds 2 lists of sentence pairs, not one"):
        list(read_manythings(path))


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.de", "Grüße\n".encode() + "Grüße\n".encode("latin-1"))
    with pytest.raises(InvalidInput, match=r"a\.de line 2 is not UTF-8 \(byte 2\)"):
        list(read_lines(path))


def test_truncated_and_false_archives_are_damaged(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.en.gz", b"Some sentence of some length.\n" * 50).read_bytes()
    for content in (whole[:-20], b"<html>not found</html>"):
        (tmp_path / "a.en.gz").write_bytes(content)
        for read in (lambda p: list(read_lines(p)), count_lines):
            with pytest.raises(InvalidInput, match="damaged"):
                read(tmp_path / "a.en.gz")
    (tmp_path / "a.zip").write_bytes(b"<html>not found</html>")
    for read in (lambda p: list(read_manythings(p)), count_lines):
        with pytest.raises(InvalidInput, match="damaged"):
            read(tmp_path / "a.zip")


def test_missing_files_are_named(tmp_path: Path) -> None:
    for read in (read_lines, read_tsv, read_manythings, lambda p: iter([count_lines(p)])):
        with pytest.raises(NotFound, match=r"no file .*gone\.zip"):
            next(read(tmp_path / "gone.zip"))
    with pytest.raises(NotFound, match=r"no train\.en or train\.en\.gz in "):
        find_text(tmp_path, "train", "en")
    with pytest.raises(NotFound, match="no file or folder"):
        text_stems(tmp_path / "gone", "en")
