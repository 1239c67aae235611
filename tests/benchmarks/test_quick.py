"""The table of floors, and what happens below one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models import NAMES
from benchmarks.pairing import Ratio
from benchmarks.peers import OURS, PEERS
from benchmarks.quick import Floor, FloorBroken, read_floors, require
from serving.core.errors import ConfigError


def test_the_committed_table_names_what_there_is() -> None:
    floors = read_floors()
    assert {floor.subject for floor in floors} <= set(NAMES)
    assert {floor.peer for floor in floors} <= set(PEERS) - {OURS}
    assert len({str(floor) for floor in floors}) == len(floors)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds"),
        ("[[floor]]\nsubject = 'small'", "batch"),
        ("[[floor]]\nsubject='small'\nbeam=1\nbatch=1\npeer='marian'\nleast=1.0", "no peer 'marian'"),
        ("[[floor]]\nsubject='small'\nbeam=1\nbatch=1\npeer='ctranslate2'\nleast=0", "greater than 0"),
        ("[[flor]]\nsubject='small'", "nothing else"),
        ("floor = ", "floors.toml"),
    ],
)
def test_a_table_that_is_wrong_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "floors.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why) as raised:
        read_floors(path)
    assert "\n" not in str(raised.value)


def cell(least: float, value: float, batch: int = 1) -> tuple[Floor, Ratio]:
    floor = Floor(subject="small", beam=1, batch=batch, peer="ctranslate2", least=least)
    return floor, Ratio(value, value, value)


def test_the_worst_is_named_in_one_line() -> None:
    with pytest.raises(FloorBroken) as raised:
        require([cell(1.0, 0.9), cell(2.0, 1.0, batch=32), cell(1.0, 3.0, batch=8)])
    assert str(raised.value) == "small, beam 1, batch 32, ctranslate2: 1.00 times as fast, must be 2.00, and 1 more"


def test_floors_that_are_held_say_nothing() -> None:
    require([cell(1.0, 1.0), cell(2.0, 2.5)])
    require([])
