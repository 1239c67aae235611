"""A whole export: a model from outside the project, trained, exported, judged, shown and served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import export.cli as commands
from export.errors import ExportError, GateError, ParityError
from export.pipeline import Options, export_bundle
from export.subject import load_subject, read_development_set
from serving.core.errors import InvalidInput
from serving.core.manifest import Bundle, open_bundle
from serving.core.types import SearchOptions
from serving.engine.engine import Engine
from serving.engine.sessions import open_stages
from serving.engine.translator import Translation, Translator
from tests.export import bag_of_words
from tests.support.toy import toy_config
from training.config import parse_config
from training.models.base import State
from training.runner import train

ROOT = Path(__file__).resolve().parent.parent.parent
BOTH = ("fp32", "int8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A training run of a model whose file stands outside the project and is named by its import path."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copy(bag_of_words.__file__, folder / "bag_from_outside.py")
    sys.path.insert(0, str(folder))
    try:
        model = {"architecture": "bag_from_outside:BagOfWords", "size": 32}
        config = parse_config(toy_config(folder / "data", model, schedule={"steps": 400}, evaluation={"every": 200}))
        train(config, folder / "run")
        yield folder / "run"
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle of that run, made by the command."""
    output = tmp_path_factory.mktemp("bundles") / "bag"
    result = call(
        "export", str(run), "-o", str(output), "--name", "bag", "--version", "7", "--beam", "2", "--max-loss", "100"
    )
    assert result.exit_code == 0, result.output
    return open_bundle(output)


def call(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(getattr(commands, command), list(arguments))


def test_a_model_from_outside_is_trained_exported_and_served(run: Path, bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert (manifest.name, manifest.version, manifest.search.beam) == ("bag", "7", 2)
    assert manifest.architecture == "bag_from_outside:BagOfWords"
    assert set(manifest.precisions) == set(BOTH)
    assert manifest.default_precision == "int8"
    assert all(set(graphs.graphs) == {"encode", "step"} for graphs in manifest.precisions.values())  # no attention
    for precision in BOTH:
        with Engine(bundle, open_stages(bundle, precision, "cpu", 1)) as engine:
            found = Translator(bundle, engine).translate(["one two", "", "red house"], SearchOptions(beam=2))
            assert all(isinstance(one, Translation) for one in found)
            assert [bool(one.text) for one in found if isinstance(one, Translation)] == [True, False, True]


def test_the_manifest_holds_the_proof(bundle: Bundle) -> None:
    manifest = bundle.manifest
    fp32, int8 = manifest.precisions["fp32"], manifest.precisions["int8"]
    assert fp32.parity.keys() == {"encode", "step", "neighbours"}
    assert max(fp32.parity.values()) < 1e-4
    assert int8.parity["step"] > fp32.parity["step"]
    assert fp32.quality["sentences"] == 20
    assert str(fp32.quality["set"]).startswith("dev.source, dev.target (first 20, SHA-256 ")
    assert str(fp32.quality["bleu_signature"]).startswith("nrefs:1|case:mixed")
    assert int8.quality["bleu_fp32"] == fp32.quality["bleu"]
    assert int8.operators["step"]["MatMulIntegerToFloat"] == 2
    assert int8.quantized["int8 in step"] == "1 GatherBlockQuantized, 2 MatMulIntegerToFloat"
    assert manifest.tools.opset == 24
    assert {"torch", "onnx", "onnxscript", "onnxruntime"} <= set(manifest.tools.versions)
    assert manifest.provenance.licence == "CC0"
    assert manifest.provenance.details["training"]["step"] in (200, 400)
    assert manifest.provenance.details["config"]["model"]["size"] == 32


def test_the_manifest_names_no_place_of_this_machine(run: Path, bundle: Bundle) -> None:
    text = (bundle.path / "manifest.json").read_text(encoding="utf-8")
    assert str(run.parent) not in text
    assert str(ROOT) not in text


def test_inspect_shows_everything(bundle: Bundle) -> None:
    result = call("inspect", str(bundle.path))
    assert result.exit_code == 0, result.output
    for word in (
        "bag 7",
        "step.int8.onnx",
        "MatMulIntegerToFloat",
        "recurrent",
        "from PyTorch",
        "bleu_loss",
        "CC0",
        "codec",
    ):
        assert word in result.output, word
    as_json = call("inspect", str(bundle.path), "--json")
    assert json.loads(as_json.output)["name"] == "bag"


def test_inspect_needs_neither_torch_nor_onnx(bundle: Bundle) -> None:
    code = (
        "import sys\nfor name in ('torch', 'onnx', 'onnx_ir', 'onnxscript', 'onnxruntime'): sys.modules[name] = None\n"
        f"from export.cli import inspect\ninspect([{str(bundle.path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step.fp32.onnx" in done.stdout


@pytest.mark.parametrize("package", ["torch", "onnxruntime"])
def test_a_missing_package_is_one_line_with_the_remedy(package: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from fuseq.cli import main; main()"
    command = [sys.executable, "-c", code, "export", "nowhere", "-o", str(tmp_path / "bag")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"fuseq: export needs {package}, which is not installed: pip install 'fuseq[cpu,train]'\n"


def test_the_same_checkpoint_gives_the_same_bundle(run: Path, bundle: Bundle, tmp_path: Path) -> None:
    """In a process of its own, where sets and dictionaries of strings are ordered otherwise."""
    arguments = [
        str(run),
        "-o",
        str(tmp_path / "bag"),
        "--name",
        "bag",
        "--version",
        "7",
        "--beam",
        "2",
        "--max-loss",
        "100",
    ]
    code = f"import sys; sys.path.insert(0, {str(run.parent)!r}); from export.cli import export; export({arguments!r})"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    again = open_bundle(tmp_path / "bag").manifest
    assert again.files == bundle.manifest.files
    assert again == bundle.manifest


def test_a_bundle_is_replaced_only_when_asked(run: Path, bundle: Bundle, tmp_path: Path) -> None:
    output = tmp_path / "bag"
    shutil.copytree(bundle.path, output)
    result = call("export", str(run), "-o", str(output))
    assert isinstance(result.exception, ExportError)
    assert "--force" in str(result.exception)
    other = tmp_path / "letters"
    other.mkdir()
    (other / "letter.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(ExportError, match="no bundle"):
        export_bundle(load_subject(run), other, Options(force=True))
    assert (other / "letter.txt").read_text(encoding="utf-8") == "dear"


def test_one_precision_alone(run: Path, tmp_path: Path) -> None:
    subject = load_subject(run)
    alone = export_bundle(subject, tmp_path / "bag", Options(precisions=("int8",), gate=False))
    assert set(alone.manifest.precisions) == {"int8"}
    assert set(alone.manifest.files) == {"codec.model", "encoder.int8.onnx", "step.int8.onnx", "weights.int8.bin"}
    assert not alone.manifest.precisions["int8"].quality
    with pytest.raises(GateError, match="lost"):
        export_bundle(subject, tmp_path / "bag", Options(force=True, max_loss=-101.0))
    assert open_bundle(tmp_path / "bag").manifest == alone.manifest
    assert [path.name for path in tmp_path.iterdir()] == ["bag"]


def test_case_42_the_gate_needs_a_development_set(run: Path, tmp_path: Path) -> None:
    subject = replace(load_subject(run), dev=None)
    with pytest.raises(ExportError, match="--dev"):
        export_bundle(subject, tmp_path / "bag", Options())
    assert not (tmp_path / "bag").exists()


def test_case_42_int8_gibberish_does_not_leave_the_house(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of the outputs in the wrong order: the graph runs, and its sentences are nonsense."""
    from export import quantize

    true = quantize.quantize_outputs
    monkeypatch.setattr(quantize, "quantize_outputs", lambda weight: true(weight[:, ::-1]))
    with pytest.raises(GateError, match=r"int8 reaches .* BLEU, fp32 .* lost"):
        export_bundle(load_subject(run), tmp_path / "bag", Options())
    assert not any(tmp_path.iterdir())


class ForgetfulModel(bag_of_words.BagOfWords):
    """Its step does not do what its teacher-forced forward does."""

    def step(self, tokens: object, positions: object, state: State) -> tuple[object, State]:  # type: ignore[override]
        logits, updated = super().step(tokens, positions, state)  # type: ignore[arg-type]
        return logits, {"said": updated["said"] * 0.9}


def test_failing_parity_stops_the_export(run: Path, tmp_path: Path) -> None:
    subject = load_subject(run)
    model = ForgetfulModel(bag_of_words.Config(), subject.model.sizes)
    with pytest.raises(ParityError, match="stage step differs from PyTorch by"):
        export_bundle(replace(subject, model=model), tmp_path / "bag", Options())
    assert not any(tmp_path.iterdir())


def test_development_sets_are_named_by_content(tmp_path: Path) -> None:
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_text("one\ntwo\n", encoding="utf-8")
    target.write_text("eins\nzwei\n", encoding="utf-8")
    found = read_development_set(source, target)
    assert (list(found.sources), list(found.references)) == (["one", "two"], ["eins", "zwei"])
    target.write_text("eins\ndrei\n", encoding="utf-8")
    assert read_development_set(source, target).name != found.name
    target.write_text("eins\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match="not parallel"):
        read_development_set(source, target)
    source.write_text("", encoding="utf-8")
    target.write_text("", encoding="utf-8")
    with pytest.raises(InvalidInput, match="empty"):
        read_development_set(source, target)
