"""What a run finds, as JSON lines: first the run itself, then one record a figure."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmarks.machine import Machine
from serving.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("onnxruntime", "torch", "transformers", "ctranslate2", "litserve", "grpcio", "numpy")

Record = dict[str, Any]


def commit() -> str:
    """The checked-out commit, with a + where files were changed since; "" outside a checkout."""
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=8", "--match="],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of what takes part, as far as it is installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Recorder:
    """Collects records, and writes each to a file at once."""

    def __init__(self, path: Path | None, machine: Machine, **details: Any) -> None:
        self.records: list[Record] = []
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        self.add("run", date=today, commit=commit(), machine=asdict(machine), versions=versions(), **details)

    def add(self, record: str, **fields: Any) -> Record:
        """Keep and write a record."""
        entry = {"record": record, **fields}
        self.records.append(entry)
        if self._file is not None:
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._file.flush()
        return entry

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        ConfigError: it is no file of records.
    """
    return list(_lines(path))


def _lines(path: Path) -> Iterator[Record]:
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            entry = json.loads(line)
            if not isinstance(entry, dict) or "record" not in entry:
                raise ConfigError(f"{path}:{number}: no record")
            yield entry
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON lines ({error})") from None
