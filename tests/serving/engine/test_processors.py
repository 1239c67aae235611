from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from serving.engine import processors


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("limits", "granted"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"a/cpu.max": "400000 100000"}, 4.0),
        ({"a/cpu.max": "max 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ({"a/cpu.max": "100000 100000", "a/b/cpu.max": "800000 100000"}, 1.0),
        ({"a/b/cpu.max": "nonsense"}, math.inf),
    ],
)
def test_the_narrowest_quota_on_the_way_up_holds(tmp_path: Path, limits: dict[str, str], granted: float) -> None:
    write(tmp_path / "groups", "0::/a/b\n")
    for name, text in limits.items():
        write(tmp_path / "fs" / name, text)
    assert processors.quota(tmp_path / "groups", tmp_path / "fs") == granted


@pytest.mark.parametrize(("microseconds", "granted"), [("-1", math.inf), ("250000", 2.5)])
def test_control_groups_of_version_1(tmp_path: Path, microseconds: str, granted: float) -> None:
    write(tmp_path / "groups", "11:memory:/x\n4:cpu,cpuacct:/x\n0::/\n")
    write(tmp_path / "fs/cpu/x/cpu.cfs_quota_us", microseconds)
    write(tmp_path / "fs/cpu/x/cpu.cfs_period_us", "100000")
    assert processors.quota(tmp_path / "groups", tmp_path / "fs") == granted


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert processors.quota(tmp_path / "none", tmp_path) == math.inf


def test_usable_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    for granted, usable in ((math.inf, 6), (2.5, 2), (0.5, 1), (64.0, 6)):
        monkeypatch.setattr(processors, "quota", lambda granted=granted: granted)
        assert processors.usable() == usable
