"""`fuseq evaluate`: the same model scores the same as a run and as a bundle, and faulty outputs are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from click.testing import CliRunner

from export.evaluate import evaluate
from export.evaluation import Output, TestSet, measure, open_files
from export.pipeline import Options, export_bundle
from export.subject import load_subject
from fuseq import cli as console
from serving.core.errors import FuseqError, InvalidInput
from serving.core.types import StopReason
from tests.support.toy import TRANSFORMER, toy_config, toy_pairs
from training import runner
from training.config import parse_config
from training.corpus import Pair
from training.split import Entry, Split, write_split

SENTENCES = 14


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps: enough to say something, not to say it well."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"schedule": {"steps": 120, "warmup": 10}, "optimiser": {"name": "muon", "rate": 0.003}}
    evaluation = {"every": 120, "sentences": 4, "beam": 2}
    tree = toy_config(folder / "data", TRANSFORMER, **settings, evaluation=evaluation, limits={"source": 24})
    runner.train(parse_config(tree), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "toy"
    export_bundle(load_subject(run), path, Options(precisions=("fp32",), gate=False))
    return path


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split whose test part has a blank sentence, one over the limit, and uneven references."""
    pairs = toy_pairs(SENTENCES - 2, seed=7)
    entries = [Entry(source, (target, f"{target} eins")[: 1 + n % 2]) for n, (source, target) in enumerate(pairs)]
    entries += [Entry("", ("nichts",)), Entry("house tree " * 30, ("haus baum " * 30,))]
    folder = tmp_path_factory.mktemp("split") / "xx-yy"
    write_split(
        Split([Pair("one", "eins")], {"test": entries}),
        folder,
        recipe="toy",
        source="xx",
        target="yy",
        method="",
        seed=1,
        cleaning={},
        provenance={},
    )
    return folder


def call(*arguments: str | Path) -> str:
    done = CliRunner().invoke(evaluate, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_a_run_and_its_bundle_translate_the_same(run: Path, bundle: Path, split: Path, tmp_path: Path) -> None:
    results = {}
    for target in (run, bundle, run / "best.pt"):
        written = tmp_path / "out.txt"
        found = json.loads(call(target, "--data", split, "--beam", "3", "--json", "--output", written))
        results[target] = {
            key: found[key] for key in ("scores", "all_references", "empty", "copied", "looping", "beam")
        }
        texts = written.read_text("utf-8").split("\n")
        assert len(texts) == SENTENCES + 1
        assert texts[SENTENCES - 2] == ""  # of the blank sentence, which is no fault
        assert len(set(texts)) > SENTENCES // 2
        assert (found["sentences"], found["truncated"]) == (SENTENCES, 1)
        assert found["empty"] == (texts[:-1].count("") - 1) / SENTENCES
        references = [list(column) for column in zip(*_single_references(split), strict=True)]
        assert found["scores"]["bleu"] == sacrebleu.corpus_bleu(texts[:-1], references).score
        assert found["all_references"]["bleu_signature"].startswith("nrefs:var|")
    assert results[run] == results[bundle] == results[run / "best.pt"]


def _single_references(split: Path) -> list[list[str]]:
    return [[line] for line in (split / "test.yy").read_text("utf-8").split("\n")[:-1]]


def test_what_decoded_is_named(run: Path, bundle: Path, split: Path) -> None:
    found = json.loads(call(bundle, "--data", split, "--json"))
    assert {key: found[key] for key in ("kind", "architecture", "precision", "device", "beam", "set")} == {
        "kind": "bundle",
        "architecture": "transformer",
        "precision": "fp32",
        "device": "cpu",
        "beam": 1,  # the bundle's own
        "set": "toy test",
    }
    assert found["sentences_per_second"] > 0
    found = json.loads(call(run, "--data", split, "--json"))
    assert (found["kind"], found["step"], found["beam"]) == ("training run", 120, 2)  # the run's own


def test_people_get_scores_signatures_and_shares(bundle: Path, run: Path, split: Path) -> None:
    printed = call(bundle, "--data", split, "--part", "test")
    for part in ("one reference: BLEU ", "all references: BLEU ", "nrefs:1|case:mixed", "nrefs:var|", "together "):
        assert part in printed
    assert "1 sentences were over the model's limit and cut" in printed
    assert "sentences/s" in printed
    assert "sentences/s" not in call(run, "--data", split)


def test_files_may_have_several_references(bundle: Path, split: Path, tmp_path: Path) -> None:
    for name, text in (("s", "one two\nred dog\n"), ("a", "eins zwei\nrot hund\n"), ("b", "eins\nhund\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    source, first, second = (tmp_path / name for name in "sab")
    found = json.loads(call(bundle, "--source", source, "--reference", first, "--reference", second, "--json"))
    assert found["sentences"] == 2
    assert found["all_references"]["bleu_signature"].startswith("nrefs:2|")
    found = json.loads(call(bundle, "--source", source, "--reference", first, "--json"))
    assert found["all_references"] is None


def outputs(*rows: tuple[str, StopReason]) -> list[Output]:
    return [Output(text, reason, False) for text, reason in rows]


def test_each_fault_is_counted_once_in_the_sum() -> None:
    sources = ["Tom.", "How are you?", "I see.", "Go on.", "", "Tom!", "We are here.", "Stop it."]
    references = [["Tom."], ["Wie geht's?"], ["Ich sehe."], ["Weiter."], [""], ["Thomas!"], ["Wir sind da."], ["Halt."]]
    eos, length, loop = StopReason.EOS, StopReason.LENGTH, StopReason.REPETITION
    report = measure(
        TestSet("made up", sources, references),
        outputs(
            ("Tom.", eos),  # its reference, too: no copy
            (" ", eos),  # empty
            ("I see.", eos),  # copied
            ("Weiter weiter", loop),
            ("", eos),  # nothing for nothing
            ("Tom!", length),  # copied and too long
            ("Wir sind da.", eos),
            ("", loop),  # empty and looping
        ),
    )
    assert (report.empty, report.copied, report.looping, report.faulty) == (2 / 8, 2 / 8, 3 / 8, 5 / 8)
    assert report.all_references is None


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The line of a call that fails, through the console script."""
    monkeypatch.setattr(sys, "argv", ["fuseq", "evaluate", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        console.main()
    assert left.value.code not in (0, None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_what_is_wrong_is_one_line(
    run: Path,
    bundle: Path,
    split: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "one").write_text("a\n", encoding="utf-8")
    (tmp_path / "two").write_text("a\nb\n", encoding="utf-8")
    cases: list[tuple[list[Any], str]] = [
        ([bundle], "say what to measure on"),
        ([bundle, "--data", split, "--source", tmp_path / "one"], "say what to measure on"),
        ([bundle, "--source", tmp_path / "one"], "say what to measure on"),
        ([bundle, "--source", tmp_path / "one", "--reference", tmp_path / "two"], "not parallel"),
        ([bundle, "--data", tmp_path], "no split.json"),
        ([bundle, "--data", split, "--part", "dev"], "no part 'dev'; it has train, test"),
        ([bundle, "--data", split, "--precision", "int8"], "it holds fp32"),
        ([run, "--data", split, "--precision", "fp32"], "no bundle"),
        ([tmp_path, "--data", split], "neither a bundle"),
        ([tmp_path / "missing", "--data", split], "not a training run"),
        ([bundle, "--data", split, "--output", tmp_path], "--output"),
        ([bundle, "--data", split, "--output", tmp_path / "missing" / "x"], "--output"),
    ]
    for arguments, message in cases:
        assert message in refused(monkeypatch, capsys, *arguments)


def test_another_language_pair_and_altered_files_are_refused(run: Path, split: Path, tmp_path: Path) -> None:
    reversed_split = tmp_path / "yy-xx"
    reversed_split.mkdir()
    for path in split.iterdir():
        (reversed_split / path.name).write_bytes(path.read_bytes())
    record = json.loads((split / "split.json").read_text("utf-8"))
    for name in ("train", "test"):
        (reversed_split / f"{name}.zz").write_bytes((split / f"{name}.yy").read_bytes())
        record["files"][f"{name}.zz"] = record["files"].pop(f"{name}.yy")
    record["target"] = "zz"
    (reversed_split / "split.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(FuseqError, match="the model translates xx-yy, but toy test is xx-zz"):
        call(run, "--data", reversed_split)
    with (reversed_split / "test.zz").open("a", encoding="utf-8") as file:
        file.write("more\n")
    with pytest.raises(InvalidInput, match="was altered"):
        call(run, "--data", reversed_split)


def test_a_test_set_has_sentences(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("", encoding="utf-8")
    with pytest.raises(InvalidInput, match="has no sentences"):
        open_files(tmp_path / "empty", [tmp_path / "empty"])


def test_a_bundle_is_evaluated_without_torch(bundle: Path, split: Path) -> None:
    report = f"""
import sys
sys.argv = ["fuseq", "evaluate", {str(bundle)!r}, "--data", {str(split)!r}, "--json"]
from fuseq.cli import main
try:
    main()
except SystemExit as left:
    assert not left.code
print(*sorted(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=120)
    result, modules = done.stdout.splitlines()
    assert json.loads(result)["sentences"] == SENTENCES
    assert not {"torch", "onnx", "matplotlib", "grpc"} & set(modules.split())
