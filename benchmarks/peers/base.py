"""What every engine that is measured must offer. Runs on Python 3.10 too: one of them exists for nothing newer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

MOST_AT_ONCE = 128  # sentences that go through a model together; of more, parts of similar length are made

Ids = list[list[int]]
Setting = dict[str, Any]  # what is swept, JSON values only; "env" holds environment variables of the process


@dataclass(frozen=True)
class Search:
    """How a batch is decoded; the same for all, so that all do the same work.

    No length penalty and no stop at repetitions: every engine has another one, and without them all of them look
    for the likeliest output and find the same one.
    """

    beam: int = 1
    limit: int = 128  # most tokens generated, the end symbol included
    forced: int = 0  # exactly so many tokens, the end symbol never chosen; 0 lets the model end

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)


@dataclass(frozen=True)
class Weights:
    """Where a subject's weights lie in the formats of the engines, and what its ids mean.

    Outputs hold neither start nor end symbol. `texts` says that an engine gets text and gives text (as ids).
    """

    folder: str  # of all the formats
    form: str  # "marian": a Hugging Face MarianMT checkpoint; "fuseq": a model of training.models
    vocabulary: int
    pad: int
    eos: int
    start: int

    def path(self, *parts: str) -> Path:
        """A file or folder of the subject."""
        return Path(self.folder, *parts)

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)


class Peer(ABC):
    """An engine with a subject's weights, at one setting, in a process of its own (see `benchmarks.worker`)."""

    name: ClassVar[str]
    package: ClassVar[str]  # on the package index, for versions and for what to install
    module: ClassVar[str]  # whose absence means that the peer is not installed
    exact: ClassVar[Setting | None] = None  # the setting at which its tokens must equal ours in fp32; None: never

    def __init__(self, weights: Weights, setting: Setting) -> None:
        self.weights, self.setting = weights, setting

    @classmethod
    @abstractmethod
    def settings(cls, cores: int, batch: int) -> list[Setting]:
        """The settings worth trying for batches of `batch` on `cores` processors."""

    def prepare(self, batch: Ids) -> Any:
        """What the engine wants for a batch of source ids (end symbol included); not timed."""
        return batch

    @abstractmethod
    def run(self, prepared: Any, search: Search) -> Any:
        """Translate; this is what is timed."""

    def outputs(self, raw: Any) -> Ids:
        """Target ids of what `run` gave, without control symbols; not timed."""
        return [list(row) for row in raw]

    @abstractmethod
    def files(self) -> list[Path]:
        """Files and folders that this setting needs on disk."""

    def translate(self, batch: Ids, search: Search) -> tuple[Ids, float]:
        """Outputs and seconds of one batch."""
        prepared = self.prepare(batch)
        begin = time.perf_counter()
        raw = self.run(prepared, search)
        seconds = time.perf_counter() - begin
        return self.outputs(raw), seconds

    def disk_bytes(self) -> int:
        """Size of the model on disk."""
        found: set[Path] = set()
        for path in self.files():
            found.update(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else found.add(path)
        return sum(file.stat().st_size for file in found)

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Stop threads and the like."""


def thread_counts(cores: int) -> list[int]:
    """Numbers of threads worth trying: powers of two up to the processors, and all of them."""
    return sorted({count for count in (1, 2, 4, 8, 16, 32, cores) if count <= cores})
