"""Nobody is timed before the outputs agree."""

from __future__ import annotations

import pytest

from benchmarks.agreement import Disagreement, compare, require_equal


def test_identical_and_common_beginning() -> None:
    found = compare([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]])
    assert found.identical == 0.5
    assert found.prefix == pytest.approx((2 + 2) / 6)


def test_an_output_that_is_longer_is_another_output() -> None:
    found = compare([[1, 2]], [[1, 2, 3]])
    assert found.identical == 0.0
    assert found.prefix == 1.0


def test_nothing_at_all_agrees() -> None:
    assert compare([], []).identical == 1.0
    assert compare([[]], [[]]).prefix == 1.0


def test_lost_sentences_are_no_agreement() -> None:
    with pytest.raises(Disagreement, match="lost"):
        compare([[1]], [])


def test_the_first_difference_is_named() -> None:
    require_equal("x", [[1], [2]], [[1], [2]])
    with pytest.raises(Disagreement, match=r"small: 50.0% .* sentence 1: \[3\], ours \[2\]"):
        require_equal("small", [[1], [2]], [[1], [3]])
