"""The picture of a run shows what is in its log."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from training.plots import plot_run

ENTRIES = [
    {"step": step, "train_loss": 5.0 - n, "dev_loss": 4.5 - n, "bleu": 10.0 * n, "chrf": 20.0 * n}
    for n, step in enumerate((100, 200, 300))
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []
    original = Figure.savefig

    def savefig(figure: Figure, *arguments: object, **options: object) -> None:
        figures.append(figure)
        original(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_the_lines_are_the_log(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_run(ENTRIES, tmp_path / "curves.png", "a $name_with% signs")
    lines = {line.get_label(): line.get_xydata().tolist() for axes in drawn[0].axes for line in axes.lines}
    assert lines == {
        "training (smoothed labels)": [[100, 5], [200, 4], [300, 3]],
        "development": [[100, 4.5], [200, 3.5], [300, 2.5]],
        "BLEU": [[100, 0], [200, 10], [300, 20]],
        "chrF": [[100, 0], [200, 20], [300, 40]],
    }
    png = (tmp_path / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert (width, height) == (1100, 440)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_a_run_of_one_evaluation_is_drawn_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_run(ENTRIES[:1], tmp_path / "curves.png", "one")
    assert (tmp_path / "curves.png").stat().st_size > 1000
