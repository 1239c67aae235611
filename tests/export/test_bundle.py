"""A bundle appears as a whole or not at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from export.bundle import check_place, new_bundle
from export.errors import ExportError
from serving.core.manifest import CodecEntry, GraphSet, Limits, Manifest, Special, Tools, open_bundle

ROOT = Path(__file__).resolve().parent.parent.parent


def manifest(version: str) -> Manifest:
    codec = CodecEntry(kind="sentencepiece", file="codec.model", size=8)
    return Manifest(
        name="x",
        version=version,
        architecture="y",
        state=(),
        source_codec=codec,
        target_codec=codec,
        special=Special(pad=0, bos=1, eos=2, unk=3),
        limits=Limits(source=8, target=8),
        precisions={"fp32": GraphSet(graphs={"encode": "encoder.onnx"})},
        default_precision="fp32",
        tools=Tools(opset=24, ir=10),
        files={},
    )


def write(output: Path, version: str) -> None:
    """A bundle whose files all hold its version."""
    with new_bundle(output, force=True) as draft:
        for name in ("codec.model", "encoder.onnx"):
            (draft.folder / name).write_text(version * 1000, encoding="utf-8")
        draft.seal(manifest(version))
        draft.publish()


def test_a_new_one_and_a_replaced_one(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "bundle"
    write(output, "1")
    assert open_bundle(output).manifest.version == "1"
    write(output, "2")
    assert open_bundle(output).manifest.version == "2"
    assert set(open_bundle(output).manifest.files) == {"codec.model", "encoder.onnx"}
    assert os.listdir(output.parent) == ["bundle"]


def test_a_failure_leaves_the_old_one_and_no_remains(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    write(output, "1")

    def fail() -> None:
        with new_bundle(output, force=True) as draft:
            (draft.folder / "codec.model").write_text("half", encoding="utf-8")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert open_bundle(output).manifest.version == "1"
    assert os.listdir(tmp_path) == ["bundle"]


def test_what_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ExportError, match="no bundle"):
        check_place(tmp_path / "file", force=True)
    (tmp_path / "empty").mkdir()
    check_place(tmp_path / "empty", force=False)
    write(tmp_path / "empty", "1")
    assert open_bundle(tmp_path / "empty").manifest.version == "1"


def test_killed_at_any_moment_it_leaves_an_old_or_a_new_one(tmp_path: Path) -> None:
    """A process replaces the bundle over and over until it is killed."""
    output, generator = tmp_path / "bundle", random.Random(0)
    write(output, "0")
    code = (
        "import sys, itertools\nfrom pathlib import Path\nfrom tests.export.test_bundle import write\n"
        "for n in itertools.count(1): write(Path(sys.argv[1]), str(n)); print(n, flush=True)"
    )
    seen = set()
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", code, str(output)], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(generator.uniform(0.005, 0.08))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        version = open_bundle(output).manifest.version
        assert (output / "encoder.onnx").read_text(encoding="utf-8") == version * 1000
        seen.add(version)
    assert len(seen) > 1
    write(output, "done")
    assert os.listdir(tmp_path) == ["bundle"]  # the drafts of killed processes are gone
