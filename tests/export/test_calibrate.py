"""Ranges hold what flows through a layer, are the same for a layer in every stage, and leave no file behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.calibrate import CODES, Range, best_range, calibrate, key, linear_weight, random_sources
from export.fusions import fuse
from export.graphs import build_stages
from export.heads import add_search_head
from export.nodes import walk
from export.weights import save_graphs
from serving.core.types import SpecialIds
from tests.export.conftest import SIZES, shake
from training.models.base import Sizes
from training.models.transformer import Config, Transformer


@settings(deadline=None)
@given(st.floats(-50, 0, width=32), st.floats(0, 50, width=32))
def test_zero_is_met_exactly_and_the_rest_to_half_a_code(low: float, high: float) -> None:
    found = Range(low, high)
    values = np.linspace(low, high, 100, dtype=np.float32)
    assert 0 <= found.zero <= CODES
    assert float(found.rounded(np.zeros(1, np.float32))[0]) == 0
    assert np.abs(found.rounded(values) - values).max() <= found.scale * 1.01 + 1e-9  # half for the value, half for 0


def test_a_rare_outlier_is_cut_and_a_common_one_kept() -> None:
    random = np.random.default_rng(1)
    body = random.standard_normal(20_000).astype(np.float32)
    rare = best_range(-5.0, 40.0, body)  # seen once, and not among the values that were kept
    assert rare.high < 6
    assert rare.low < -3
    common = best_range(-5.0, 40.0, np.append(body[:200], np.full(200, np.float32(40))))
    assert common.high == 40


def test_values_that_never_differ_have_a_range() -> None:
    found = best_range(0.0, 0.0, np.zeros(4, np.float32))
    assert found.rounded(np.zeros(2, np.float32)).tolist() == [0, 0]


@pytest.mark.parametrize("sizes", [SIZES, Sizes(5, 5, 2, 4), Sizes(1000, 9, 50, 60, SpecialIds(0, 1, 2, 3))])
def test_random_sources_fit_the_model(sizes: Sizes) -> None:
    for source in random_sources(sizes, 50):
        assert 2 <= len(source) <= sizes.source_limit
        assert max(source) < sizes.source_vocabulary
        assert source[-1] == sizes.special.eos


def test_every_layer_of_every_stage_has_a_range(tmp_path: Path) -> None:
    folder = tmp_path
    config = Config(size=32, feed_forward=64, heads=4, encoder_layers=1, decoder_layers=1)
    model = shake(Transformer(config, SIZES))
    stages = build_stages(model)
    for stage in stages.values():
        fuse(stage)
    add_search_head(stages["step"])
    save_graphs(folder, {f"{name}.onnx": stage.model for name, stage in stages.items()}, "weights.bin")
    files, outputs = sorted(folder.iterdir()), [value.name for value in stages["step"].graph.outputs]
    sources = random_sources(SIZES, 4)
    ranges = calibrate(stages, folder, model.state_spec(), SIZES, sources)
    assert sorted(folder.iterdir()) == files
    assert [value.name for value in stages["step"].graph.outputs] == outputs
    for stage in stages.values():
        for node in walk(stage.graph):
            if (weight := linear_weight(node)) is not None:
                assert ranges[key(weight)].high > 0
    relu = [found for found in ranges.values() if found.low == 0]
    assert len(relu) == 2  # what the second matrices of the feed-forward layers read
    assert calibrate(stages, folder, model.state_spec(), SIZES, sources) == ranges
