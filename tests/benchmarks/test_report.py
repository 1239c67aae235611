"""Tables and figures from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.machine import Machine
from benchmarks.records import Recorder, read
from benchmarks.report import figure, headline, markdown, show
from benchmarks.tables import LAYOUTS, setting
from serving.core.errors import ConfigError

MACHINE = Machine("A processor", ("avx2",), (0, 1), 24.0, "6.1")


def some(path: Path | None = None) -> Recorder:
    recorder = Recorder(path, MACHINE, part="offline", quick=True, tiny=False)
    recorder.add(
        "offline", subject="small", beam=4, batch=32, peer="ctranslate2", disk_mib=14.04,
        setting={"intra": 2, "env": {"CT2_USE_MKL": "1"}},
        sentences_per_s=1234.56, tokens_per_s=29629.4, p50_ms=25.921, p95_ms=30.0, peak_rss_mib=99.6,
        ours_faster=1.5, ours_faster_low=1.4, ours_faster_high=1.6,
    )  # fmt: skip
    for server in ("fuseq", "other"):
        for rate, p95 in ((10.0, 5.0), (20.0, 9.0), (40.0, None)):
            recorder.add("online-load", subject="small", inputs=16, server=server, rate=rate, p95_ms=p95)
    recorder.close()
    return recorder


def test_records_come_back_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "records" / "a.jsonl"
    recorder = some(path)
    assert read(path) == json.loads(json.dumps(recorder.records))
    assert read(path)[0]["machine"]["cpus"] == [0, 1]


@pytest.mark.parametrize(("text", "why"), [("{", "not JSON lines"), ("[1]", "no record"), ('{"a": 1}', "no record")])
def test_other_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        read(path)


def test_markdown_holds_every_figure_and_where_it_comes_from() -> None:
    text = markdown(some().records)
    assert "A processor" in text.splitlines()[0]
    assert "2 CPUs, avx2" in text.splitlines()[0]
    [row] = [line for line in text.splitlines() if line.startswith("| small | 4 | 32 |")]
    for cell in ("ctranslate2", "1,234.6", "29,629", "25.92", "30.00", "100", "14.0", "1.50", "1.40", "1.60"):
        assert f" {cell} " in row
    assert "intra=2 CT2_USE_MKL=1" in row
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1  # heading, rule and rows


def test_every_layout_can_be_printed_though_fields_are_missing() -> None:
    records: list[dict[str, Any]] = [some().records[0]]
    records += [{"record": kind, "subject": "small"} for kind in LAYOUTS]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(records, console)
    printed = console.export_text()
    assert all(layout.title in printed for layout in LAYOUTS.values())


def test_settings_are_short() -> None:
    assert setting({}) == "defaults"
    assert setting({"threads": 2, "dtype": "bfloat16"}) == "threads=2 dtype=bfloat16"


def test_figure_shows_every_server(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.svg"
    figure(some().records, path)
    drawn = path.read_text(encoding="utf-8")
    assert "<svg" in drawn
    with pytest.raises(ConfigError, match="no loads"):
        figure([json.loads('{"record": "offline"}')], path)


def test_a_run_of_toy_models_says_so() -> None:
    recorder = Recorder(None, MACHINE, tiny=True)
    assert "toy models" in headline(recorder.records)
    assert headline([]) == ""
