"""Splits: which sentences train a model and which judge it.

A corpus such as Tatoeba translates the same sentence several times, so a split by pair puts test sentences into the
training part. Here the unit is the source sentence, known by `sentence_key` (no case, spaces, punctuation): all
pairs of one key go to the same part. Which part is decided by a SHA-256 of seed and key, so the split depends on the
set of sentences only, never on the order of the corpus, on Python's hashing or on a random generator's version.

A split on disk is a folder:

    train.<source>, train.<target>   UTF-8, one sentence a line ("\\n"), line n of one translates line n of the other;
                                     every translation is a line of its own. Shuffled (by digest).
    dev.<source>, dev.<target>       unique source sentences with one reference each, chosen by digest
    test.<source>, test.<target>     the same
    dev.refs.jsonl, test.refs.jsonl  line n: {"source": ..., "references": [...]} with ALL translations of the source
                                     on line n, for multi-reference scores; the reference in <part>.<target> is first
    split.json                       what `SplitRecord` says: recipe, languages, seed, method, counts, SHA-256 of every
                                     file and of the whole, the cleaning report, licence and attribution; written last,
                                     so a folder without it is unfinished

`<source>` and `<target>` are language codes ("en", "de"). A published split (Multi30k) has the same layout with
further parts ("test_2017_flickr") and, where published, `<part>.lc.norm.tok.<target>`: the references as published
scores use them. Open a folder with `SplitFolder.open(folder)`; `verify` compares every file with its recorded hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from serving.core.errors import InvalidInput, NotFound
from training.corpus import Pair, read_lines, read_parallel

RECORD_FILE = "split.json"
SCHEMA = 1
ASCII_KEY = {i: None for i in range(128) if unicodedata.category(chr(i))[0] in "PZC"}


class Entry(NamedTuple):
    """A sentence to be judged on, with all its translations; the first is the single reference."""

    source: str
    references: tuple[str, ...]


@dataclass
class Split:
    """The parts of a corpus, before they are written."""

    train: list[Pair]
    judged: dict[str, list[Entry]]
    """Part name ("dev", "test", ...) to its sentences."""
    withheld: int = 0
    """Pairs in no part: their source is a judged sentence written otherwise ("Hi!" beside "Hi.")."""
    tokenized: dict[str, list[str]] = field(default_factory=dict)
    """Part name to its references as published scores use them (lowercased, normalised, tokenized)."""


@dataclass(frozen=True)
class SplitRecord:
    """What split.json says. `sha256` stands for the whole split: it is taken over the hashes of its files."""

    recipe: str
    source: str
    target: str
    method: str
    seed: int | None
    parts: dict[str, dict[str, int]]
    files: dict[str, str]
    """File name to the SHA-256 of its bytes."""
    sha256: str
    withheld: int
    """Pairs in no part (see `Split.withheld`)."""
    cleaning: dict[str, Any]
    provenance: dict[str, Any]
    """Where the data is published, licence, attribution, and the SHA-256 of the files it was read from."""
    schema: int = SCHEMA


def sentence_key(text: str) -> str:
    """What makes two sentences the same for a split: letters, digits and symbols, without case, spaces, punctuation.

    NFKC and case-folded, so "Hi.", "hi!" and "H I" are one key. A text of nothing but punctuation is its own key.
    """
    if text.isascii():  # The same result, several times faster
        return text.translate(ASCII_KEY).lower() or text.strip()
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    kept = "".join(c for c in folded if unicodedata.category(c)[0] not in "PZC")
    return kept or folded.strip()


def split_by_source(pairs: Iterable[Pair], *, seed: int, sizes: dict[str, int]) -> Split:
    """Draw `sizes[part]` unique source sentences for each judged part; all pairs of other sentences are for training.

    Of several spellings of one key ("Hi!", "Hi.") one is judged and the pairs of the others are withheld.

    Raises:
        InvalidInput: the corpus has not more unique source sentences than the judged parts ask for.
    """
    by_key: dict[str, list[Pair]] = {}
    for pair in set(pairs):
        by_key.setdefault(sentence_key(pair.source), []).append(pair)
    if len(by_key) <= sum(sizes.values()):
        raise InvalidInput(
            f"the corpus has {len(by_key)} unique source sentences, not more than the {sum(sizes.values())} to be "
            f"held out; ask for fewer with --dev and --test"
        )
    order = iter(sorted(by_key, key=lambda key: (_rank(seed, key), key)))
    judged: dict[str, list[Entry]] = {}
    withheld = 0
    for part, size in sizes.items():
        groups = [by_key.pop(next(order)) for _ in range(size)]
        judged[part] = [_entry(seed, group) for group in groups]
        withheld += sum(len(g) - len(e.references) for g, e in zip(groups, judged[part], strict=True))
    train = [pair for group in by_key.values() for pair in group]
    train.sort(key=lambda pair: (_rank(seed, *pair), pair))
    return Split(train, judged, withheld)


def _entry(seed: int, group: Sequence[Pair]) -> Entry:
    sources = {pair.source for pair in group}
    source = min(sources, key=lambda text: (_rank(seed, text), text))
    targets = [pair.target for pair in group if pair.source == source]
    return Entry(source, tuple(sorted(targets, key=lambda text: (_rank(seed, source, text), text))))


def _rank(seed: int, *texts: str) -> bytes:
    return hashlib.sha256("\0".join((str(seed), *texts)).encode()).digest()


def write_split(
    split: Split,
    folder: Path,
    *,
    recipe: str,
    source: str,
    target: str,
    method: str,
    seed: int | None,
    cleaning: dict[str, Any],
    provenance: dict[str, Any],
    replace: bool = False,
) -> SplitRecord:
    """Write the files of the layout above; each appears whole or not at all, split.json last.

    Raises:
        InvalidInput: `folder` holds another split and `replace` is not set, or a sentence holds a line break.
    """
    texts = {f"train.{source}": [p.source for p in split.train], f"train.{target}": [p.target for p in split.train]}
    for part, entries in split.judged.items():
        texts[f"{part}.{source}"] = [e.source for e in entries]
        texts[f"{part}.{target}"] = [e.references[0] for e in entries]
        texts[f"{part}.refs.jsonl"] = [json.dumps(e._asdict(), ensure_ascii=False) for e in entries]
    for part, lines in split.tokenized.items():
        texts[f"{part}.lc.norm.tok.{target}"] = lines
    contents = {name: _joined(name, lines) for name, lines in texts.items()}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(contents.items())}
    record = SplitRecord(
        recipe=recipe,
        source=source,
        target=target,
        method=method,
        seed=seed,
        parts=_counts(split),
        files=files,
        sha256=split_hash(files),
        withheld=split.withheld,
        cleaning=cleaning,
        provenance=provenance,
    )
    _refuse_another(folder, record, replace)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD_FILE).unlink(missing_ok=True)
    for name, content in contents.items():
        _write(folder / name, content)
    _write(folder / RECORD_FILE, (json.dumps(asdict(record), ensure_ascii=False, indent=2) + "\n").encode())
    return record


def split_hash(files: dict[str, str]) -> str:
    """SHA-256 over the lines "<sha256>  <name>" of the files in the order of their names (as sha256sum prints them)."""
    return hashlib.sha256("".join(f"{files[name]}  {name}\n" for name in sorted(files)).encode()).hexdigest()


def _counts(split: Split) -> dict[str, dict[str, int]]:
    """Per part: pairs, unique source sentences and, for a judged part, what it shares with the training part."""
    trained_sources = {sentence_key(pair.source) for pair in split.train}
    trained_targets = {sentence_key(pair.target) for pair in split.train}
    counts = {"train": {"pairs": len(split.train), "unique_sources": len({pair.source for pair in split.train})}}
    for part, entries in split.judged.items():
        counts[part] = {
            "pairs": len(entries),
            "unique_sources": len({e.source for e in entries}),
            "references": sum(len(e.references) for e in entries),
            "sources_in_train": sum(sentence_key(e.source) in trained_sources for e in entries),
            "references_in_train": sum(sentence_key(e.references[0]) in trained_targets for e in entries),
        }
    return counts


def _joined(name: str, lines: Sequence[str]) -> bytes:
    for number, line in enumerate(lines, start=1):
        if "\n" in line or "\r" in line:
            raise InvalidInput(f"the sentence for line {number} of {name} holds a line break; clean the corpus first")
    return "".join(f"{line}\n" for line in lines).encode()


def _refuse_another(folder: Path, record: SplitRecord, replace: bool) -> None:
    if not replace and (folder / RECORD_FILE).is_file():
        there = SplitFolder.open(folder).record
        if there.sha256 != record.sha256:
            which = there.recipe if there.seed is None else f"{there.recipe}, seed {there.seed}"
            raise InvalidInput(f"{folder} holds another split ({which}); name another folder or say --replace")


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


@dataclass(frozen=True)
class SplitFolder:
    """A split on disk."""

    folder: Path
    record: SplitRecord

    @classmethod
    def open(cls, folder: Path) -> SplitFolder:
        """Read split.json.

        Raises:
            NotFound: the folder has none.
            InvalidInput: it cannot be read, or was written under a newer schema.
        """
        try:
            fields = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise NotFound(f"no {RECORD_FILE} in {folder}; make a split with `fuseq data NAME --to DIR`") from error
        except ValueError as error:
            raise InvalidInput(f"{folder / RECORD_FILE} cannot be read ({error}); make the split again") from error
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            raise InvalidInput(f"{folder / RECORD_FILE} is not of schema {SCHEMA}; make the split again")
        return cls(folder, SplitRecord(**fields))

    def parts(self) -> list[str]:
        """Names of the parts, training first."""
        return list(self.record.parts)

    def path(self, part: str, language: str) -> Path:
        """The text file of a part in a language.

        Raises:
            NotFound: the split has no such part or language.
        """
        name = f"{part}.{language}"
        if name not in self.record.files:
            raise NotFound(f"the split in {self.folder} has no {name}; it has {', '.join(sorted(self.record.files))}")
        return self.folder / name

    def pairs(self, part: str) -> Iterator[Pair]:
        """Stream the pairs of a part."""
        return read_parallel(self.path(part, self.record.source), self.path(part, self.record.target))

    def references(self, part: str) -> list[list[str]]:
        """All translations of each source sentence of a judged part, in the order of its lines."""
        return [list(json.loads(line)["references"]) for line in read_lines(self.path(part, "refs.jsonl"))]

    def tokenized_references(self, part: str) -> list[str] | None:
        """The references as published scores use them, where the split has them."""
        name = f"{part}.lc.norm.tok.{self.record.target}"
        return list(read_lines(self.folder / name)) if name in self.record.files else None

    def verify(self) -> None:
        """Compare every file with its recorded hash.

        Raises:
            NotFound: a file is missing.
            InvalidInput: a file was altered since the split was made.
        """
        for name, expected in self.record.files.items():
            path = self.folder / name
            if not path.is_file():
                raise NotFound(f"{path} is missing; make the split again")
            if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                raise InvalidInput(f"{path} was altered since the split was made; make the split again")
