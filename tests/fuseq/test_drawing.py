"""Alignments in the terminal."""

from __future__ import annotations

import numpy as np
import pytest

from fuseq.drawing import SHADES, draw_alignment, shade
from fuseq.translation import Alignment


@pytest.mark.parametrize(
    ("weight", "block"), [(0.0, " "), (0.19, " "), (0.2, "░"), (0.5, "▒"), (0.99, "█"), (1.0, "█")]
)
def test_shades(weight: float, block: str) -> None:
    assert shade(weight) == block


def test_shades_never_get_lighter() -> None:
    depths = [SHADES.index(shade(weight / 100)) for weight in range(101)]
    assert depths == sorted(depths)
    assert depths[-1] == len(SHADES) - 1


def test_a_picture() -> None:
    weights = np.array([[1.0, 0, 0], [0, 0.5, 0.5], [0, 0, 1.0]], np.float32)
    picture = draw_alignment(Alignment(("▁the", "▁cat", "</s>"), ("▁die", "▁Katze", "</s>"), weights))
    assert picture.plain.split("\n") == [
        "          <",
        "      t c /",
        "      h a s",
        "      e t >",
        "  die ██",
        "Katze   ▒▒▒▒",
        " </s>     ██",
    ]


def test_long_wide_and_unprintable_pieces_keep_the_columns() -> None:
    weights = np.eye(2, dtype=np.float32)
    picture = draw_alignment(Alignment(("▁" + "x" * 40, "駅"), ("a\nb", "y" * 40), weights)).plain.split("\n")
    assert len(picture) == 14 + 2
    assert picture[-2].endswith(" ██")
    assert "a?b" in picture[-2]
    assert picture[-1].startswith("y" * 13 + "… ")


def test_nothing_to_draw() -> None:
    assert draw_alignment(Alignment((), (), np.zeros((0, 0), np.float32))).plain == ""
