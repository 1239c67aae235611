"""`fuseq train` as it is called: overrides, resumption, and one line for everything that is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from fuseq import cli as console
from tests.support.toy import TRANSFORMER, toy_config
from training import runner
from training.checkpoint import read_json
from training.cli import train
from training.loop import read_log


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration for two quick steps, in the folder where the command is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "plot_run", lambda entries, path, title: None)
    tree = toy_config(Path("data"), TRANSFORMER, schedule={"steps": 2}, evaluation={"sentences": 2})
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return tmp_path / "toy.yaml"


def call(*arguments: str) -> str:
    """Standard error of a call that succeeds."""
    done = CliRunner().invoke(train, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stderr


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line of a call that fails, through the console script."""
    monkeypatch.setattr(sys, "argv", ["fuseq", "train", *arguments])
    with pytest.raises(SystemExit) as left:
        console.main()
    assert left.value.code not in (0, None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_run_lies_in_runs_under_its_name_unless_told_otherwise(file: Path, tmp_path: Path) -> None:
    written = call("toy.yaml")
    assert "400 pairs" in written
    assert "best BLEU" in written
    assert "model in runs/toy" in written
    call("toy.yaml", "--run", "elsewhere", "schedule.steps=1", "name=other")
    config = read_json(tmp_path / "elsewhere" / "config.json")
    assert (config["schedule"]["steps"], config["name"]) == (1, "other")
    assert (tmp_path / "runs" / "toy" / "best.pt").is_file()


def test_resume_goes_on_and_begins_where_there_is_nothing(file: Path, tmp_path: Path) -> None:
    call("toy.yaml", "--resume")
    call("toy.yaml", "--resume", "schedule.steps=4")
    assert [entry["step"] for entry in read_log(tmp_path / "runs" / "toy")] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.yaml"], "no configuration at nothing.yaml"),
        (["toy.yaml", "schedule.step=3"], "did you mean 'schedule.steps'?"),
        (["toy.yaml", "schedule.steps=-3"], "schedule.steps:"),
        (["toy.yaml", "model.size=wide"], "model.size:"),
        (["toy.yaml", "model.dropout=1.5"], "dropout"),
        (["toy.yaml", "data.train.source=gone.txt"], "gone.txt"),
        (["toy.yaml", "--run", "toy.yaml"], "toy.yaml"),
        (["toy.yaml", "--rum", "x"], "No such option"),
        ([], "Missing argument"),
    ],
)
def test_what_is_wrong_is_one_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Any, message: str
) -> None:
    assert message in refused(monkeypatch, capsys, *arguments)


def test_a_run_is_not_overwritten(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call("toy.yaml", "schedule.steps=1")
    assert "--resume" in refused(monkeypatch, capsys, "toy.yaml")


def loaded_by(*arguments: str) -> set[str]:
    """Modules that a call of the console script loads."""
    report = f"import sys\nsys.argv = {['fuseq', *arguments]!r}\nfrom fuseq.cli import main\n"
    report += "try:\n    main()\nexcept SystemExit as left:\n    assert not left.code\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.splitlines()[-1].split())


def test_help_and_data_load_no_torch() -> None:
    for arguments in (["data", "--list"], ["data", "--help"], ["train", "--help"]):
        loaded = loaded_by(*arguments)
        assert "training.cli" in loaded
        assert not loaded & {"torch", "matplotlib", "sacrebleu", "numpy"}, arguments
