"""Every part on toy models, with the peers that are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import ROOT, read

pytestmark = pytest.mark.slow

PARTS: dict[str, tuple[list[str], str]] = {
    "offline": (["--subject", "small", "--batch", "2"], "offline"),
    "online": (["--subject", "small", "--no-sweep"], "online-capacity"),
    "overhead": (["--subject", "small"], "overhead"),
    "growth": (["--subject", "small"], "leak"),
    "floor": (["--subject", "small"], "floor"),
    "gpu-check": (["--subject", "bahdanau", "--device", "cpu"], "gpu-speed"),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toy models are kept."""
    return tmp_path_factory.mktemp("bench")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_part(part: str, work: Path) -> None:
    for package in ("ctranslate2", "transformers", "psutil"):
        pytest.importorskip(package)
    arguments, wanted = PARTS[part]
    output = work / f"{part}.jsonl"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        part,
        "--tiny",
        "--work",
        str(work),
        "--json",
        str(output),
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    records: list[dict[str, Any]] = read(output)
    assert [record for record in records if record["record"] == wanted]
    for record in records:
        if record["record"] == "agreement" and record.get("equal_in_fp32"):
            assert record["peer"] in ("ctranslate2", "huggingface", "plain-onnx")
