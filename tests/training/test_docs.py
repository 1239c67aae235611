"""docs/training.md says what the code does: every key with its default, every file of a run, and a model that works."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tests.support.toy import TRANSFORMER, toy_config, write_corpus
from training.cli import train
from training.config import Config, parse_config
from training.models.base import find_architecture
from training.runner import train as run_training

DOCS = Path(__file__).resolve().parents[2] / "docs" / "training.md"
MODELS = Path(__file__).resolve().parents[2] / "training" / "models"


def shown(default: Any) -> str:
    """A default as YAML has it."""
    if default is PydanticUndefined:
        return ""
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return (
        f"`{default}`".replace("True", "true").replace("False", "false").replace("None", "null").replace("``", "`''`")
    )


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A row for each key of the configuration."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{prefix}{name}.")
        else:
            assert field.description, f"{prefix}{name} has no description"
            yield f"| `{prefix}{name}` | {shown(field.default)} | {field.description} |"


def table_under(heading: str) -> list[str]:
    """Rows of the first table under a heading, without its head."""
    section = re.split(r"^#+ ", DOCS.read_text("utf-8").split(f"\n{heading}\n")[1], maxsplit=1, flags=re.M)[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def test_every_key_is_documented_as_it_is() -> None:
    assert table_under("## Configuration") == list(keys_of(Config))


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("[a-z]*.py") if path.stem != "base"))
def test_every_key_of_an_architecture_is_documented(name: str) -> None:
    fields = dataclasses.fields(find_architecture(name).Config)
    documented = [row.split(" | ")[:2] for row in table_under(f"### Keys of `{name}`")]
    assert documented == [[f"| `model.{field.name}`", shown(field.default)] for field in fields]


def test_every_file_of_a_run_is_documented(tmp_path: Path) -> None:
    settings = {"schedule": {"steps": 1}, "evaluation": {"sentences": 1}}
    run_training(parse_config(toy_config(tmp_path / "data", TRANSFORMER, **settings)), tmp_path / "run")
    files = {path.name + "/" * path.is_dir() for path in (tmp_path / "run").iterdir()}
    documented = [re.findall("`(.+?)`", row)[0] for row in table_under("## The folder of a run")]
    assert sorted(documented) == sorted(files)


def test_the_architecture_of_the_text_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", DOCS.read_text("utf-8"), re.S):
        (tmp_path / name).write_text(text, encoding="utf-8")
    section = write_corpus(tmp_path / "toy")
    (tmp_path / "data").mkdir()
    for part in ("train", "dev"):
        for side, language in (("source", "en"), ("target", "de")):
            Path(section[part][side]).rename(tmp_path / "data" / f"{part}.{language}")
    monkeypatch.chdir(tmp_path)
    quick = ["vocabulary.size=300", "schedule.steps=2", "evaluation.sentences=2", "evaluation.degenerate_from=2"]
    done = CliRunner().invoke(train, ["bag.yaml", *quick, "run.threads=1"], catch_exceptions=False)
    assert done.exit_code == 0
    assert (tmp_path / "runs" / "bag" / "best.pt").is_file()
