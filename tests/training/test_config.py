"""Configurations are checked as a whole, and a wrong key names the nearest right one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from serving.core.errors import ConfigError, NotFound
from tests.support.toy import TRANSFORMER, toy_config
from training.config import Config, load_config, parse_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(toy_config(tmp_path / "data", TRANSFORMER)), encoding="utf-8")
    return path


def test_overrides_reach_nested_keys(file: Path) -> None:
    config = load_config(file, ["schedule.steps=7", "model.size=64", "run.device=cpu"])
    assert (config.schedule.steps, config.architecture_config().size, config.run.device) == (7, 64, "cpu")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("schedule.step=7", "schedule.steps"),
        ("optimizer.rate=1", "optimiser"),
        ("model.sizee=64", "model.size"),
        ("batches.token=1", "batches.tokens"),
    ],
)
def test_an_unknown_key_names_the_nearest(file: Path, override: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key .*; did you mean '{nearest}") as error:
        load_config(file, [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "override",
    ["schedule.steps=0", "schedule.steps=many", "model.architecture=unheard_of", "model.heads=5", "nonsense", "a: [=1"],
)
def test_a_wrong_value_is_one_line(file: Path, override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(file, [override])
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid_and_comments_its_keys(path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, Config)
    assert parse_config(config.model_dump(mode="json")) == config
    for line in path.read_text("utf-8").splitlines():
        section_or_comment = not line.strip() or line.lstrip().startswith("#") or line.endswith(":")
        assert section_or_comment or "  # " in line, f"{line!r} has no comment"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.size=wide", r"model\.size: .* integer"),
        ("model.pre_norm=perhaps", r"model\.pre_norm: .* boolean"),
        ("model.dropout=1.0", "dropout"),
        ("model.decoder_layers=0", "at least 1"),
        ("model.size=33", "divisible"),
        ("run.seed=-1", r"run\.seed"),
        ("optimiser.label_smoothing=1", r"optimiser\.label_smoothing"),
        ("optimiser.betas=[0.9, 1.5]", r"optimiser\.betas\.1"),
        ("optimiser.rate=.inf", r"optimiser\.rate"),
    ],
)
def test_a_wrong_value_names_its_key(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(file, [override])
    assert "\n" not in str(error.value)


OUTSIDE = """
from dataclasses import dataclass
from training.models.base import Model

class Odd:
    pass

@dataclass(frozen=True)
class Config:
    kind: Odd  # a type that no validator knows
    size: int = 4

class Mine(Model):
    Config = Config

class Bare(Model):
    Config = dict
"""


def test_a_module_where_the_command_is_run_is_found(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    monkeypatch.delitem(sys.modules, "outside", raising=False)
    tree = yaml.safe_load(file.read_text("utf-8"))
    tree["model"] = {"architecture": "outside:Mine", "kind": "anything", "size": 7}
    config = parse_config(tree).architecture_config()
    assert (config.kind, config.size) == ("anything", 7)
    tree["model"]["sise"] = 7
    with pytest.raises(ConfigError, match=r"did you mean 'model\.size'"):
        parse_config(tree)
    for name, message in (
        ("outside:Bare", "no dataclass"),
        ("outside:Gone", "Gone"),
        ("outside:Odd", "not a subclass"),
    ):
        tree["model"] = {"architecture": name}
        with pytest.raises(ConfigError, match=message):
            parse_config(tree)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfename: x", "UTF-8"), (b"[" * 3_000, "too deeply"), (b"- " * 3_000, "too deeply")],
)
def test_a_file_that_is_no_configuration_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


@pytest.mark.parametrize("name", ['name="a\\nb"', 'name=""', 'name="\\ud800"', "name=../a", "name=.."])
def test_a_name_that_no_bundle_could_have_is_refused_before_the_training(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name: "):
        load_config(file, [name])
